"""Checkpoints that go from the plain script of Megatron-LM to its elastic run and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.script.plain import PlainJob, PlainRun, run_plain
from liver_hpc.checkpoint.index import INDEX_FILE
from liver_hpc.checkpoint.torch_dist.files import read_common, read_table
from liver_hpc.cli.client import stop
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE, iteration_path, tracked_step
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.megatron_lm.checkout import core_release
from liver_hpc.recipes.megatron_lm.owned import Owned, schedule_in_samples
from liver_hpc.recipes.specs import derive_spec
from liver_hpc.report.store import RunRecords, read_run
from tests.integration.elastic import losses
from tests.integration.runs import ENDLESS, finish, start, tails, watch, worst_difference
from tests.integration.test_megatron_lm import EXPERTS, WORDS, Config, config

__all__ = ["config"]

pytestmark = pytest.mark.timeout(400)

real = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="wants MEGATRON_LM=CHECKOUT")

LIMIT_S = 200.0
SAVED_AT, MORE = 5, 5
TP2 = {"tp": 2, "sequence_parallel": True}
PLAIN = "--use-cpu-initialization --use-distributed-optimizer --log-interval 1"
FLAGS = {
    "tp": "--sequence-parallel --tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
}


def plain(checkout: Path, directory: Path, words: str, **layout: int) -> PlainRun:
    """The plain script in a layout of two ranks, or of one."""
    flags = " ".join(f"{FLAGS[axis]} {size}" for axis, size in layout.items() if axis in FLAGS)
    job = PlainJob(checkout, f"{words} {PLAIN} {flags}".split(), 2 if layout else 1)
    return run_plain(job, directory, Deadline.after(SystemClock(), LIMIT_S, "the script"))


def same(mine: Mapping[int, float], other: Mapping[int, float], apart: float = 1e-5) -> bool:
    return {step: pytest.approx(value, rel=apart) for step, value in mine.items()} == {
        step: other[step] for step in mine
    }


def handed_over_and_saved(config: Any) -> tuple[RunRecords, int]:
    """A run that is stopped with a checkpoint after its one handoff; the checkpoint's step."""
    run = start(config)
    watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == 1, 100.0)
    watch(run, lambda status: status.handoff is None, 20.0)
    outcome = stop(run, checkpoint=True)
    assert f"checkpoint of step {outcome.step} in" in outcome.reason, tails(run)
    return read_run(run.path), outcome.step


@real
@pytest.mark.slow
@pytest.mark.timeout(6 * LIMIT_S)
@pytest.mark.parametrize(
    ("words", "saved", "begins", "goes_to", "resumed"),
    [
        pytest.param(WORDS, {"cp": 2}, TP2, {"pp": 2}, {"dp": 2}, id="dense"),
        pytest.param(
            WORDS + EXPERTS,
            {"cp": 2},
            {"pp": 2},
            {"cp": 2, "ep": 2},
            {"dp": 2, "ep": 2},
            id="experts",
        ),
        pytest.param(
            f"{WORDS} --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion",
            TP2,
            {"pp": 2},
            TP2,
            {"dp": 2},
            id="multi-token",
        ),
        pytest.param(
            f"{WORDS} --calculate-per-token-loss --eod-mask-loss",
            {"cp": 2},
            TP2,
            {"pp": 2},
            {"dp": 2},
            id="per-token",
        ),
        pytest.param(
            f"{WORDS} --bf16 --grad-reduce-in-bf16", TP2, {"pp": 2}, TP2, {"dp": 2}, id="bf16"
        ),
        pytest.param(
            f"{WORDS} --decoupled-lr 5e-3", TP2, {"pp": 2}, TP2, {"dp": 2}, id="decoupled"
        ),
        pytest.param(
            WORDS.replace("-impl local", "-impl transformer_engine") + "--no-rope-fusion",
            TP2,
            {"pp": 2},
            TP2,
            {"dp": 2},
            id="transformer-engine",
        ),
    ],
)
def test_the_plain_script_goes_on_elastically_and_plainly_again(
    request: pytest.FixtureRequest,
    config: Config,
    tmp_path: Path,
    megatron_lm: Path,
    words: str,
    saved: dict[str, int],
    begins: dict[str, Any],
    goes_to: dict[str, Any],
    resumed: dict[str, int],
) -> None:
    if "-impl transformer_engine" in words:
        request.getfixturevalue("engine")
    job, state, back = f"{words} --save-interval {SAVED_AT}", tmp_path / "job", tmp_path / "back"
    saving = f"--save {state} --exit-interval {SAVED_AT}"
    plain(megatron_lm, tmp_path / "plain", f"{job} {saving}", **saved)

    loading = f"{words} --save {back} --save-interval {ENDLESS} --load {state}"
    notices = [{"at_step": SAVED_AT + 3, "layout": goes_to}]
    elastic, step = handed_over_and_saved(config(loading, {2: [begins, goes_to]}, notices))
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"]
    assert elastic.steps[0].step == SAVED_AT

    ending = f"--exit-interval {step + MORE}"
    again = f"{words} {ending} --load {back} --exit-on-missing-checkpoint"
    end = plain(megatron_lm, tmp_path / "resumed", again, **resumed)
    assert [*end.losses] == [*range(step + 1, step + MORE + 1)]

    close = 1e-2 if "--bf16" in words else 1e-5
    whole = plain(megatron_lm, tmp_path / "whole", f"{words} {ending}")
    assert same({row.step + 1: row.loss for row in elastic.steps}, whole.losses, close)
    assert same({row.step + 1: row.grad_norm for row in elastic.steps}, whole.grad_norms, close)
    beside = {"load_balancing_loss": "--num-experts", "mtp_1 loss": "--mtp-num-layers"}
    for name in [name for name, option in beside.items() if option in words]:
        told = {m.step + 1: m.value for m in elastic.metrics if m.name == name.replace(" ", "_")}
        assert [*told] == [row.step + 1 for row in elastic.steps]
        assert same(told, whole.scalars[name], close)
    if "--decoupled-lr" in words and (core_release(megatron_lm) or "0.16") < "0.19":
        return  # as it loads, Megatron takes the rates of one group for those of all
    assert same(end.losses, whole.losses, close)
    assert same(end.grad_norms, whole.grad_norms, close)
    evaluated = {row.step: row.loss for row in elastic.evaluations}
    assert same(evaluated | dict(end.validation_losses), whole.validation_losses, close)


def test_a_job_goes_on_from_what_a_run_of_it_has_saved(config: Config, tmp_path: Path) -> None:
    """In another layout; the checkpoint has the job's own arguments and counts."""
    words = WORDS.replace(str(ENDLESS), "8").replace("--eval-interval 5", "--eval-interval 2")
    words += " --lr-warmup-fraction 0.013 --decoupled-lr 1e-2"
    directory, step = tmp_path / "saved", 4
    saving = f"{words} --save {directory} --save-interval {step}"
    layouts: dict[int, Sequence[Mapping[str, Any]]] = {2: [TP2]}
    whole = finish(start(config(saving, layouts)))
    assert tracked_step(directory) == 8

    path = iteration_path(directory, step)
    common = read_common(path, read_table(path))
    args, schedule = common["args"], common["opt_param_scheduler"]
    assert (args.consumed_train_samples, args.consumed_valid_samples) == (step * 8, 2 * 2 * 8)
    assert (args.tensor_model_parallel_size, args.sequence_parallel) == (2, True)
    assert schedule["num_steps"] == step * 8
    assert schedule.items() >= schedule_in_samples(Owned.of(words.split())).items()

    (path / INDEX_FILE).unlink()
    (directory / TRACKER_FILE).write_text(str(step))
    with pytest.raises(ConfigError, match=r"max_lr 0\.001, wanted 0\.002\. To go on by"):
        derive_spec(config(f"{words} --lr 2e-3 --load {directory}"))
    again = finish(start(config(f"{words} --load {directory}", {2: [{"pp": 2}]})))
    assert [row.step for row in again.steps] == [*range(step, 8)]
    mine = [(row.loss, row.grad_norm) for row in again.steps]
    assert worst_difference(mine, losses(whole)[step:]) <= 1e-5
    wanted = {row.step: row.loss for row in whole.evaluations}
    found = {row.step: row.loss for row in again.evaluations}
    assert found == pytest.approx({at: wanted[at] for at in found}, rel=1e-5)
    assert {6, 8} <= found.keys()


@real
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_finetuning_is_that_of_the_plain_script(
    config: Config, tmp_path: Path, megatron_lm: Path
) -> None:
    """By another schedule than the checkpoint's, in another layout, and across a handoff."""
    state = tmp_path / "job"
    saving = f"--save {state} --save-interval {SAVED_AT} --exit-interval {SAVED_AT}"
    plain(megatron_lm, tmp_path / "plain", f"{WORDS} {saving}", tp=2)

    tuning = f"{WORDS} --lr 5e-4 --finetune --load {state}"
    saving = f"--save {tmp_path / 'tuned'} --save-interval {ENDLESS}"
    notices = [{"at_step": 3, "layout": {"dp": 2}}]
    layouts: dict[int, Sequence[Mapping[str, Any]]] = {2: [{"pp": 2}, {"dp": 2}]}
    elastic, step = handed_over_and_saved(config(f"{tuning} {saving}", layouts, notices))
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"]
    assert elastic.steps[0].step == 0

    whole = plain(megatron_lm, tmp_path / "whole", f"{tuning} --exit-interval {step}")
    assert same({row.step + 1: row.loss for row in elastic.steps}, whole.losses)
    assert same({row.step + 1: row.grad_norm for row in elastic.steps}, whole.grad_norms)
