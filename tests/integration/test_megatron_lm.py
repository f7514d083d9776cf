"""A script of Megatron-LM, unchanged, whose shape changes live; of the checkout that MEGATRON_LM
names, or of a small stand-in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from liver_hpc.config.schema import RampupSection, RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.ramp import batch_of
from liver_hpc.recipes.completion import load_users_run
from liver_hpc.recipes.megatron_lm.checkout import core_release
from liver_hpc.recipes.specs import derive_spec
from liver_hpc.report.store import RunRecords, read_run
from tests.integration.elastic import losses
from tests.integration.runs import (
    ENDLESS,
    finish,
    start,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = pytest.mark.timeout(400)

real = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="wants MEGATRON_LM=CHECKOUT")

WORDS = f"""
--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--seq-length 16 --max-position-embeddings 16 --swiglu --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --untie-embeddings-and-output-weights
--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 1000
--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 32
--eval-interval 5 --eval-iters 2 --train-iters {ENDLESS}
"""
EXPERTS = """
--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
"""
RATES_AND_PRECISION = "--bf16 --grad-reduce-in-bf16 --decoupled-lr 5e-3 --decoupled-min-lr 1e-3"
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}],
}
HANDOFFS = [
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"cp": 2},
    {"pp": 2, "vpp": 2},
    {"dp": 1},
]
WITH_EXPERTS = {2: [{"dp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2}]}

BEHIND = 7
"""Steps behind the last handoff that are compared."""

Config = Callable[..., RunConfig]


@pytest.fixture
def config(tmp_path: Path, megatron_lm: Path) -> Config:
    """A run of the script by a run file as its owner has it."""

    def made(
        words: str = WORDS,
        layouts: Mapping[int, Sequence[Mapping[str, Any]]] = LAYOUTS,
        notices: Sequence[Mapping[str, Any]] = (),
        script: Path | None = None,
        initial: int | None = None,
    ) -> RunConfig:
        values = {
            "name": "script",
            "runs_directory": str(tmp_path / "runs"),
            "recipe": "liver_hpc.recipes.megatron_lm:Pretrain",
            "model": {
                "script": str(script or megatron_lm / "pretrain_gpt.py"),
                "megatron_lm": str(megatron_lm),
                "args": words,
            },
            "cluster": {"kind": "local"},
            "workers": {"initial": initial or min(layouts), "max": max(layouts)},
            "layouts": {count: [dict(one) for one in known] for count, known in layouts.items()},
            "notices": [dict(notice) for notice in notices],
        }
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load_users_run(file)

    return made


def changed(config: RunConfig) -> RunRecords:
    """A run that is stopped a while after the last of its scripted handoffs."""
    run = start(config)
    wanted = len(config.notices)
    watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == wanted, 200.0)
    # The status may come before the journal is written.
    wait_until(lambda: len(read_run(run.path).reconfigurations) == wanted, 10.0, f"{run}'s journal")
    last = read_run(run.path).reconfigurations[-1].step
    watch(run, lambda status: status.step >= last + BEHIND, 60.0)
    return stop_and_read(run)


def fixed(config: RunConfig, steps: int) -> RunRecords:
    """The same run without a handoff, so many steps of it."""
    train = config.train.model_copy(update={"steps": steps})
    return finish(start(config.model_copy(update={"notices": [], "train": train})))


@pytest.mark.parametrize(
    ("words", "layouts", "handoffs"),
    [
        pytest.param(WORDS, LAYOUTS, HANDOFFS, id="dense"),
        pytest.param(
            WORDS + EXPERTS,
            WITH_EXPERTS,
            [{"dp": 2, "ep": 2}, {"pp": 2}, {"cp": 2, "ep": 2}],
            id="experts",
            marks=pytest.mark.long,
        ),
        pytest.param(
            WORDS + RATES_AND_PRECISION,
            LAYOUTS,
            HANDOFFS,
            id="rates-and-precision",
            marks=pytest.mark.long,
        ),
    ],
)
def test_handoffs_change_neither_losses_nor_validation(
    config: Config, words: str, layouts: Any, handoffs: list[dict[str, Any]]
) -> None:
    notices = [{"at_step": 6 + 5 * n, "layout": one} for n, one in enumerate(handoffs)]
    elastic = changed(config(words, layouts, notices, initial=2))
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"] * len(handoffs)

    compared = elastic.reconfigurations[-1].step + BEHIND
    quiet = fixed(config(words, layouts), compared)
    found = losses(elastic)[:compared]
    told = {(each.name, each.step): each.value for each in elastic.metrics}
    names = ["lm loss", "load_balancing_loss"][: 2 if EXPERTS in words else 1]
    assert {*told} == {(name, each.step) for each in elastic.steps for name in names}
    for each in elastic.steps:  # what the script reports
        assert told["lm loss", each.step] == pytest.approx(each.loss)
    close = 100 if "--bf16" in words else 1
    assert worst_difference(found[:60], losses(quiet)) <= 1e-5 * close
    assert worst_difference(found, losses(quiet)) <= 1e-3 * close
    validated = {each.step: each.loss for each in elastic.evaluations}
    assert len(quiet.evaluations) >= len(handoffs)
    for each in quiet.evaluations:
        if each.step < len(elastic.steps):  # none is done where a run is stopped
            assert validated[each.step] == pytest.approx(each.loss, rel=1e-4 * close)


@pytest.mark.long
def test_handoffs_during_a_ramp_up_of_the_batch(config: Config, megatron_lm: Path) -> None:
    """The script's loss, of batches of 2, 3, ... samples; validation has 8."""
    if (core_release(megatron_lm) or "0.16") >= "0.18":
        pytest.skip("megatron-core takes no notice of --rampup-batch-size from 0.18 on")
    words = WORDS.replace(f"--train-iters {ENDLESS}", f"--train-samples {8 * ENDLESS}")
    words = words.replace("--lr-decay-iters 1000", "--lr-decay-samples 600 --lr-warmup-samples 9")
    words += " --rampup-batch-size 2 1 90"
    layouts = {2: [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]}
    notices = [{"at_step": 4, "layout": layouts[2][1]}, {"at_step": 14, "layout": layouts[2][2]}]
    made = config(words, layouts, notices)
    assert made.train.rampup == RampupSection(start=2, increment=1, samples=90)
    elastic = changed(made)
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"] * 2
    assert batch_of(made.train, elastic.reconfigurations[0].step) < 8
    quiet = fixed(config(words, layouts), len(elastic.steps))
    assert [each.tokens for each in elastic.steps] == [
        16 * batch_of(made.train, step) for step in range(len(elastic.steps))
    ]
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-4
    rates = [each.learning_rate for each in quiet.steps]
    assert [each.learning_rate for each in elastic.steps] == rates


CHANGES = {
    "partial(model_provider, gpt_builder)": "partial(model_provider, scaled_builder)",
    "gpt_config_from_args(args)": "gpt_config_from_args(args, model_config_cls=ScaledConfig)",
}
"""How the call of `pretrain` comes to another model; up to 0.18, and from then on."""


@pytest.mark.long
def test_a_script_with_a_loss_and_a_model_of_its_own(
    config: Config, tmp_path: Path, megatron_lm: Path, repository: Path
) -> None:
    """As docs/how-to/megatron-lm.md shows it."""
    page = (repository / "docs" / "how-to" / "megatron-lm.md").read_text(encoding="utf-8")
    parts, configured = re.findall(
        r"^```python test=.*?\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    plain = (megatron_lm / "pretrain_gpt.py").read_text(encoding="utf-8")
    before, main = plain.split('if __name__ == "__main__":')
    if "gpt_config_from_args(args)" in main:
        parts += configured
    for words, changed_words in CHANGES.items():
        main = main.replace(words, changed_words)
    script = tmp_path / "own" / "pretrain.py"
    script.parent.mkdir()
    script.write_text(f'{before}\n{parts}\nif __name__ == "__main__":{main}', encoding="utf-8")
    layouts = {2: [{"dp": 2}, {"tp": 2, "sequence_parallel": True}]}
    elastic = changed(config(WORDS, layouts, [{"at_step": 6, "layout": layouts[2][1]}], script))
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"]

    quiet = fixed(config(WORDS, layouts, script=script), len(elastic.steps))
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-5
    assert "scale.factors" in (tmp_path / "runs" / "latest" / "spec.json").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-layers four", "invalid int value: 'four'"),
        ("--no-such-option 3", "unrecognized arguments: --no-such-option 3"),
        ("--optimizer muon", "--optimizer muon: not supported"),
    ],
)
def test_what_the_script_does_not_take_is_told_at_submit(
    config: Config, words: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        derive_spec(config(f"{WORDS} {words}"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import megatron.training\n", r"nothing\.py ends without a call of .*pretrain"),
        ("def begin(:\n", r"nothing\.py:1: invalid syntax"),
        ("open('no.model')\n", r"FileNotFoundError: .* 'no\.model' \(.*nothing\.py, line 1\)"),
    ],
)
def test_a_script_that_does_not_come_to_train_is_told_at_submit(
    text: str, told: str, config: Config, tmp_path: Path
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text(text)
    with pytest.raises(ConfigError, match=told):
        derive_spec(config(script=script))


@pytest.mark.parametrize(
    ("before", "put", "told"),
    [
        (
            "        get_embedding_ranks=get_embedding_ranks,",
            "        non_loss_data_func=len,\n",
            r"more\.py gives non_loss_data_func to pretrain",
        ),
        (
            'if __name__ == "__main__":',
            "import megatron.training.training as loop\nloop.get_megatron_optimizer = len\n",
            r"more\.py replaces megatron\.training\.training\.get_megatron_optimizer",
        ),
        (
            'if __name__ == "__main__":',
            "def own(parser):\n"
            "    parser.set_defaults(optimizer='sgd')\n"
            "    return parser\n"
            "plain = pretrain\n"
            "def pretrain(*given, **options):\n"
            "    plain(*given, **options | {'extra_args_provider': own})\n",
            r"the script sets --optimizer sgd: not supported",
        ),
    ],
)
def test_what_a_script_has_of_its_own_and_nobody_uses_is_told_at_submit(
    config: Config, tmp_path: Path, megatron_lm: Path, before: str, put: str, told: str
) -> None:
    script = tmp_path / "more.py"
    plain = (megatron_lm / "pretrain_gpt.py").read_text(encoding="utf-8")
    assert plain.count(before) == 1
    script.write_text(plain.replace(before, f"{put}{before}"))
    with pytest.raises(ConfigError, match=told):
        derive_spec(config(script=script))


def test_another_release_of_megatron_core_is_refused(
    config: Config, tmp_path: Path, megatron_lm: Path
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "training").symlink_to(megatron_lm / "megatron" / "training")
    for name in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        (checkout / name).symlink_to(megatron_lm / name)
    info = 'MAJOR = 0\nMINOR = 9\nPATCH = 7\nPRE_RELEASE = "rc1"\n'
    (checkout / "megatron" / "core" / "package_info.py").write_text(info)
    made = config(script=checkout / "pretrain_gpt.py")
    model = {**made.model, "megatron_lm": str(checkout)}
    with pytest.raises(ConfigError, match=r"has megatron-core 0\.9\.7rc1, .* is installed"):
        derive_spec(made.model_copy(update={"model": model}))
