"""A script of Megatron-LM, run plainly: the same losses in any layout, and from a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.script.plain import PlainJob, PlainRun, read_scalars, run_plain
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError

MODEL = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--seq-length 16 --max-position-embeddings 16 --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion
--use-cpu-initialization --use-distributed-optimizer
--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --lr-decay-style constant
--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 32
--eval-interval 2 --eval-iters 2 --log-interval 1
"""
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LIMIT_S = 100.0

real = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="wants MEGATRON_LM=CHECKOUT")


def plain(checkout: Path, directory: Path, words: Sequence[str] = (), ranks: int = 1) -> PlainRun:
    job = PlainJob(checkout, [*MODEL.split(), *words], ranks)
    return run_plain(job, directory, Deadline.after(SystemClock(), LIMIT_S, "the script"))


def same(mine: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return {step: pytest.approx(value, rel=2e-6) for step, value in mine.items()} == other


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_script_trains_alike_alone_and_with_shared_sequences(
    megatron_lm: Path, tmp_path: Path
) -> None:
    alone = plain(megatron_lm, tmp_path / "alone")
    shared = plain(megatron_lm, tmp_path / "cp2", ["--context-parallel-size", "2"], ranks=2)
    assert [*alone.losses] == [*alone.grad_norms] == [1, 2, 3, 4]
    assert [*alone.validation_losses] == [2, 4]
    assert alone.losses[4] < alone.losses[1]
    assert same(alone.losses, shared.losses)
    assert same(alone.grad_norms, shared.grad_norms)
    assert same(alone.validation_losses, shared.validation_losses)


@real
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("state", "layout"),
    [(["--dist-ckpt-optim-fully-reshardable"], TP2), ([], ())],
    ids=["in another layout", "as it saves by itself"],
)
def test_the_script_resumes_from_its_checkpoint(
    megatron_lm: Path, tmp_path: Path, state: list[str], layout: tuple[str, ...]
) -> None:
    saving = ["--save", str(tmp_path / "state"), "--save-interval", "2"]
    whole = plain(megatron_lm, tmp_path / "alone", [*state, *saving])
    (tmp_path / "state" / "latest_checkpointed_iteration.txt").write_text("2", encoding="utf-8")
    loading = ["--load", str(tmp_path / "state"), "--exit-on-missing-checkpoint"]
    words = [*state, *loading, *layout]
    resumed = plain(megatron_lm, tmp_path / "resumed", words, ranks=2 if layout else 1)
    assert [*resumed.losses] == [3, 4]
    assert same(resumed.losses, {step: whole.losses[step] for step in (3, 4)})
    assert same(resumed.grad_norms, {step: whole.grad_norms[step] for step in (3, 4)})


def test_a_script_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(
        LiverError, match=r"exit code 1; .*plain\.log:(.|\n)*No such file"
    ) as raised:
        plain(tmp_path, tmp_path / "run")
    assert "ChildFailedError" not in str(raised.value)


def test_the_first_validation_after_a_step_counts() -> None:
    def line(name: str, step: int, value: float) -> str:
        return json.dumps({"name": name, "step": step, "value": value})

    run = read_scalars(
        [
            line("batch-size", 1, 8),
            line("lm loss", 1, 4.25),
            line("grad-norm", 1, 1.5),
            line("lm loss validation", 1, 4.5),
            line("lm loss validation", 1, 4.75),
        ]
    )
    assert run == PlainRun({1: 4.25}, {1: 1.5}, {1: 4.5})
