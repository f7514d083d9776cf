"""What the run file gets from a Megatron-LM job's arguments, by numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.config.megatron_checkpoint import OWNER_FILE, TRACKER_FILE
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.megatron_lm.arguments import (
    agreement,
    check_data_of,
    derived_from,
    notes_of,
    schedule_to_load,
)
from liver_hpc.recipes.megatron_lm.owned import Owned, schedule_in_samples
from tests.unit.config.test_indexed_data import write_pair
from tests.unit.megatron_ramp import has_ramp, ramp_calculator
from tests.unit.recipes.megatron_lm.jobs import JOB

SAMPLES = JOB.replace("--train-iters 1000", "--train-samples 8100")


def values(more: str, job: str = JOB) -> dict[str, Any]:
    found = derived_from(f"{job} {more}".split())
    return {".".join(map(str, path)): one.value for path, one in found.items()}


def test_megatrons_defaults_of_a_plain_job() -> None:
    assert values("") == {
        "train.steps": 1000,
        "train.global_batch": 8,
        "train.rampup": None,
        "train.micro_batch": 2,
        "train.seed": 1234,
        "train.overlap_grad_reduce": False,
        "train.overlap_param_gather": False,
        "train.grad_reduce_in_bf16": False,
        "optimizer.lr": 1e-3,
        "optimizer.min_lr": 0.0,
        "optimizer.decoupled_lr": None,
        "optimizer.decoupled_min_lr": None,
        "optimizer.weight_decay": 0.01,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.clip_grad": 1.0,
        "schedule.style": "linear",
        "schedule.warmup_init": 0.0,
        "schedule.warmup_steps": 0.0,
        "schedule.decay_steps": 1000.0,
        "eval.every_steps": 1000,
        "eval.steps": 100,
        "data": None,
    }


@pytest.mark.parametrize(
    ("job", "more", "steps", "warmup", "decay"),
    [
        (JOB, "--lr-warmup-iters 10", 1000, 10, 1000),
        (JOB, "--lr-decay-iters 800 --lr-warmup-fraction 0.01", 1000, 8, 800),
        (JOB, "--lr-warmup-fraction 0.0015", 1000, 1.5, 1000),
        (SAMPLES, "", 1012, 0, 1012.5),  # the last batch is not whole, and is left out
        (SAMPLES, "--lr-warmup-samples 100", 1012, 12.5, 1012.5),
        (SAMPLES, "--lr-decay-samples 6000 --lr-warmup-fraction 0.1", 1012, 75, 750),
    ],
)
def test_the_schedule_in_steps(
    job: str, more: str, steps: int, warmup: float, decay: float
) -> None:
    found = values(more, job)
    assert found["train.steps"] == steps
    assert found["schedule.warmup_steps"] == warmup
    assert found["schedule.decay_steps"] == decay


@pytest.mark.parametrize(
    ("job", "more", "steps", "style"),
    [
        (JOB, "--lr-wsd-decay-iters 100", 100, "exponential"),
        (SAMPLES, "--lr-wsd-decay-samples 100 --lr-wsd-decay-style minus_sqrt", 12.5, "minus_sqrt"),
    ],
)
def test_a_schedule_that_is_stable_and_then_decays(
    job: str, more: str, steps: float, style: str
) -> None:
    found = values(f"--lr-decay-style WSD {more}", job)
    assert found["schedule.style"] == "WSD"
    assert found["schedule.wsd_decay_steps"] == steps
    assert found["schedule.wsd_decay_style"] == style


@pytest.mark.parametrize(
    ("job", "more", "warmup", "decay", "whole"),
    [
        (JOB, "--lr-warmup-iters 10 --lr-decay-iters 800", 80, 6400, 8000),
        (SAMPLES, "--lr-warmup-samples 101", 101, 8100, 8100),
        (SAMPLES, "--global-batch-size 49 --lr-warmup-fraction 0.013", 0.013 * 8100, 8100, 8100),
    ],
)
def test_the_schedule_in_samples_to_the_last_digit(
    job: str, more: str, warmup: float, decay: int, whole: int
) -> None:
    assert schedule_in_samples(Owned.of(f"{job} {more}".split())) == {
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "wd_incr_steps": whole,
    }


def test_the_schedule_that_a_loaded_checkpoint_must_have() -> None:
    more = "--min-lr 1e-5 --lr-decay-style cosine --weight-decay .1 --lr-warmup-iters 10"
    assert schedule_to_load(f"{JOB} {more}".split()) == {
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "lr_warmup_steps": 80,
        "lr_decay_steps": 8000,
        "wd_incr_steps": 8000,
    }
    assert schedule_to_load(f"{JOB} --override-opt_param-scheduler".split()) == {}


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("--lr=2e-4 --lr 1e-4", "optimizer.lr", 1e-4),  # the last one holds
        ("--min-lr 1e-5", "optimizer.min_lr", 1e-5),
        ("--decoupled-lr 2e-4", "optimizer.decoupled_lr", 2e-4),
        ("--decoupled-lr 2e-4 --decoupled-min-lr 0", "optimizer.decoupled_min_lr", 0.0),
        ("--adam-beta2 0.95", "optimizer.beta2", 0.95),
        ("--clip-grad 0", "optimizer.clip_grad", 0.0),
        ("--lr-decay-style cosine", "schedule.style", "cosine"),
        ("--lr-warmup-init 1e-5", "schedule.warmup_init", 1e-5),
        ("--seed 7", "train.seed", 7),
        ("--exit-interval 10", "train.stop_every_steps", 10),
        ("--overlap-grad-reduce", "train.overlap_grad_reduce", True),
        ("--grad-reduce-in-bf16", "train.grad_reduce_in_bf16", True),
        ("--ddp-bucket-size 1000", "train.bucket_elements", 1000),
        ("--eval-interval 50", "eval.every_steps", 50),
        ("--eval-interval 50", "eval.steps", 100),
        ("--eval-interval 50 --eval-iters 0", "eval", None),
        ("--save /ckpt --save-interval 20", "checkpoint.directory", "/ckpt"),
        ("--save /ckpt --persistent-save-interval 20", "checkpoint.every_steps", 20),
    ],
)
def test_one_key(more: str, key: str, value: object) -> None:
    assert values(more)[key] == value


DATA = JOB.replace("--mock-data", "")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("--data-path /a/x", {"prefix": "/a/x", "split": "969,30,1", "seed": 1234}),
        ("--data-path 0.3 /a --split 90,10 --seed 5",
         {"prefix": "/a", "split": "90,10", "seed": 5}),
        ("--data-path /a --split .98,.01,.01",
         {"prefix": "/a", "split": "0.98,0.01,0.01", "seed": 1234}),
        ("--data-path /a --split 98/2.", {"prefix": "/a", "split": "98,2", "seed": 1234}),
        ("--data-path 0.3 /a 0.7 /b --split 100,0,0",
         {"blend": [{"prefix": "/a", "weight": 0.3}, {"prefix": "/b", "weight": 0.7}],
          "split": "100,0,0", "seed": 1234}),
    ],
)  # fmt: skip
def test_data(more: str, wanted: dict[str, Any]) -> None:
    found = values(more, DATA)
    assert {key[5:]: value for key, value in found.items() if key.startswith("data.")} == wanted


@pytest.mark.parametrize(
    "more",
    [
        "", "--mock-data", "--data-path /a /b /c", "--train-data-path /a", "--data-args-path /l",
        "--data-path s3://a/x", "--data-path 1 /a 2 msc://b/x",
    ],
)  # fmt: skip
def test_data_that_is_the_scripts_matter(more: str) -> None:
    assert values(more, DATA)["data"] is None


def test_data_is_looked_at_where_a_run_is_submitted(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [3])
    (tmp_path / "list.txt").touch()
    (tmp_path / "own.jsonl").touch()
    here = f"{tmp_path}/a {tmp_path}/own.jsonl s3://bucket/x --split 1"
    there = f"--valid-data-path 1 {tmp_path}/a --data-args-path {tmp_path}/list.txt"
    check_data_of(f"{DATA} --train-data-path {here} {there}".split())
    check_data_of(f"{JOB} --data-path /nosuch/a".split())  # where --mock-data is what counts
    words = f"{DATA} --data-path {tmp_path}/a /nosuch/b /nosuch/c --data-args-path /nosuch/d.txt"
    words = f"{words} --split 1"
    with pytest.raises(ConfigError) as error:
        check_data_of(words.split())
    assert error.value.args == (
        "model.args: --data-path: /nosuch/b.idx is missing; wanted b.bin and .idx",
        "model.args: --data-path: /nosuch/c.idx is missing; wanted c.bin and .idx",
        "model.args: --data-args-path /nosuch/d.txt: there is no such file",
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data-args-path", "0.3 HERE/a 0.7 HERE/b"),
        (
            "per-split-data-args-path",
            '{"train": [0.3, "HERE/a", 0.7, "HERE/b"], "valid": "HERE/a"}',
        ),
    ],
)
def test_data_that_a_file_lists_is_looked_at_too(name: str, text: str, tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [3])
    listed = tmp_path / "list"
    listed.write_text(text.replace("HERE", str(tmp_path)), encoding="utf-8")
    words = f"{DATA} --{name} {listed} --split 1".split()
    with pytest.raises(ConfigError, match=f"--{name}: {tmp_path}/b.idx is missing"):
        check_data_of(words)
    write_pair(tmp_path / "b", [3])
    check_data_of(words)


def test_a_share_without_a_sequence_is_refused(tmp_path: Path) -> None:
    """Megatron would look for samples in it for ever."""
    write_pair(tmp_path / "a", [3] * 400)
    words = f"{DATA} --data-path {tmp_path}/a".split()
    with pytest.raises(ConfigError) as error:
        check_data_of(words)
    assert error.value.args == (
        f"model.args: --data-path {tmp_path}/a: of its 400 sequences --split 969, 30, 1 leaves "
        "none for test, in which Megatron would look for samples for ever; "
        "wanted a larger share, or 0",
    )
    for split in ("969,30,0", "969,30,2", "1"):
        check_data_of([*words, "--split", split])
    (tmp_path / "list").write_text(f'{{"test": "{tmp_path}/a"}}', encoding="utf-8")
    check_data_of(f"{DATA} --per-split-data-args-path {tmp_path}/list".split())


@pytest.mark.parametrize(
    "more",
    [
        "--data-path /a --split 100,0,0", "--data-args-path /a --split 100", "--train-data-path /a",
        "--mock-data --split 1,0,1", "--data-path /a --eval-iters 0",
    ],
)  # fmt: skip
def test_no_validation_set(more: str) -> None:
    found = values(f"{more} --eval-interval 10", DATA)
    assert found["eval"] is None
    assert "eval.steps" not in found


def test_a_checkpoint_is_loaded_where_there_is_one(tmp_path: Path) -> None:
    more = f"--load {tmp_path}"
    assert "checkpoint.load" not in values(more)
    (note,) = notes_of(f"{JOB} {more}".split())
    assert note.endswith("begins at step 0, also where one comes before it starts")
    with pytest.raises(ConfigError, match="--exit-on-missing-checkpoint"):
        values(f"{more} --exit-on-missing-checkpoint")
    (tmp_path / TRACKER_FILE).write_text("7")
    assert notes_of(f"{JOB} {more}".split()) == []
    assert values(f"{more} --exit-on-missing-checkpoint")["checkpoint.load"] == str(tmp_path)


@pytest.mark.parametrize("more", ["", "--finetune"])
def test_a_checkpoint_whose_model_is_wrapped_is_refused(more: str, tmp_path: Path) -> None:
    (tmp_path / TRACKER_FILE).write_text("7")
    (tmp_path / "iter_0000007/modelopt_state").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not supported, its modelopt_state has"):
        values(f"--load {tmp_path} {more}")


def test_finetuning_takes_the_weights_of_what_is_loaded(tmp_path: Path) -> None:
    more = f"--load {tmp_path} --finetune --no-load-optim --no-load-rng"
    assert not any(key.startswith("checkpoint") for key in values(more))
    (tmp_path / TRACKER_FILE).write_text("release")
    found = values(f"{more} --exit-on-missing-checkpoint")
    assert found["checkpoint.weights"] == str(tmp_path)
    assert "checkpoint.load" not in found
    with pytest.raises(ConfigError, match="--finetune with --save that is --load"):
        values(f"{more} --save {tmp_path} --save-interval 5")


def test_a_job_that_leaves_the_optimizer_may_begin_but_not_go_on(tmp_path: Path) -> None:
    values("--no-load-optim --no-load-rng")
    more = f"--load {tmp_path} --no-load-optim --no-load-rng"
    saving = f"{more} --save {tmp_path} --save-interval 5"
    assert values(saving)["checkpoint.load"] == str(tmp_path)
    note = notes_of(f"{JOB} {saving}".split())[-1]
    assert note.endswith("from a checkpoint of its own a run goes on with the optimizer too")
    (tmp_path / TRACKER_FILE).write_text("7")
    with pytest.raises(ConfigError, match="goes on with the optimizer too: leave it") as error:
        values(more)
    assert str(error.value).endswith("begins at step 0")
    with pytest.raises(ConfigError, match="begins at step 0, with another --save"):
        values(saving)
    (tmp_path / OWNER_FILE).touch()
    assert values(saving)["checkpoint.load"] == str(tmp_path)
    with pytest.raises(ConfigError, match="goes on with the optimizer too: leave it"):
        values(f"{more} --save {tmp_path}/other --save-interval 5")


def test_a_pretrained_checkpoint_is_for_the_first_start(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    more = f"--pretrained-checkpoint {tmp_path}"
    assert values(more)["checkpoint.weights"] == str(tmp_path)
    more += f" --load {saves} --save {saves} --save-interval 5"
    found = values(f"{more} --exit-on-missing-checkpoint")
    assert found["checkpoint.weights"] == str(tmp_path)
    assert found["checkpoint.load"] == str(saves)
    (note,) = notes_of(f"{JOB} {more}".split())
    assert f"begins with the weights of {tmp_path}, as long as" in note
    saves.mkdir()
    (saves / TRACKER_FILE).write_text("7")
    found = values(more)
    assert "checkpoint.weights" not in found
    assert found["checkpoint.load"] == str(saves)
    assert values(f"--load {saves} --finetune")["checkpoint.weights"] == str(saves)


def test_a_checkpoint_may_come_later_where_the_job_saves(tmp_path: Path) -> None:
    more = f"--load {tmp_path} --save {tmp_path}/x/.. --save-interval 5"
    assert values(more)["checkpoint.load"] == str(tmp_path)
    (note,) = notes_of(f"{JOB} {more}".split())
    assert note == (
        f"model.args: --load {tmp_path} has no checkpoint yet: the run begins at step 0, as long "
        "as there is none"
    )
    with pytest.raises(ConfigError, match="--exit-on-missing-checkpoint"):
        values(f"{more} --exit-on-missing-checkpoint")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (JOB.replace("--global-batch-size 8", ""), "--global-batch-size must be given"),
        (JOB.replace("--micro-batch-size 2", ""), "--micro-batch-size must be given"),
        (JOB.replace("--lr 1e-3", ""), "--lr must be given"),
        (JOB.replace("--train-iters 1000", ""), "--train-iters or --train-samples"),
        (f"{JOB} --save /c", "--save wants --save-interval"),
        (f"{JOB} --save s3://c --save-interval 5", "--save s3://c: not supported, wanted a dir"),
        (f"{JOB} --load msc://c", "--load msc://c: not supported, wanted a directory"),
        (f"{JOB} --train-samples 8", "--train-iters and --train-samples"),
        (f"{JOB} --lr-decay-samples 8", "--train-iters and --lr-decay-samples"),
        (f"{SAMPLES} --lr-warmup-iters 8", "--train-samples and --lr-warmup-iters"),
        (f"{JOB} --lr-warmup-fraction .1 --lr-warmup-iters 8", "--lr-warmup-fraction and"),
        (f"{JOB} --min-lr 1", "--min-lr 1 is more than --lr 0.001"),
        (f"{JOB} --lr-warmup-init 1", "--lr-warmup-init 1 is more than --lr 0.001"),
        (f"{JOB} --overlap-param-gather", "wants --overlap-grad-reduce"),
        (f"{JOB} --decoupled-min-lr 1e-5", "--decoupled-min-lr wants --decoupled-lr"),
        (f"{JOB} --lr-decay-style WSD", "WSD wants --lr-wsd-decay-iters or"),
        (f"{JOB} --lr-decay-style WSD --lr-wsd-decay-samples 8", "--train-iters and --lr-wsd"),
        (f"{JOB} --micro-batch-size 0", "--micro-batch-size 0: wanted at least 1"),
        (f"{JOB} --global-batch-size 0", "--global-batch-size 0: wanted at least 1"),
        (f"{SAMPLES} --global-batch-size -8", "--global-batch-size -8: wanted at least 1"),
        (f"{JOB} --train-iters 0", "--train-iters 0: wanted at least 1"),
        (f"{SAMPLES} --train-samples 0", "--train-samples 0: wanted at least 1"),
        (f"{JOB} --split 0.9.5,1", "--split 0.9.5,1: wanted one to three numbers"),
        (f"{JOB} --split .", "--split .: wanted one to three numbers"),
        (f"{JOB} --split none", "--split none: wanted one to three numbers"),
        (f"{JOB} --split 1,1,1,1", "--split 1,1,1,1: wanted one to three numbers"),
        (f"{JOB} --lr high", "--lr: invalid float value: 'high'"),
        (f"stray {JOB}", "wanted an option such as --num-layers, got 'stray'"),
    ],
)
def test_what_is_missing_or_not_meant_together(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        derived_from(words.split())


RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 300"


def megatrons_steps(start: int, increment: int, samples: int, whole: int, all_samples: int) -> int:
    """By Megatron's calculator, as its `update_train_iters` asks it."""
    calculator = ramp_calculator(start, increment, samples, whole)
    steps = consumed = 0
    while consumed <= samples and consumed <= all_samples:
        calculator.update(consumed, consistency_check=False)
        consumed += calculator.get_current_global_batch_size()
        steps += 1
    return steps + max(0, all_samples - consumed) // whole


@has_ramp
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 500), st.data())
def test_the_steps_of_a_ramp_up_are_megatrons(
    start: int, increment: int, times: int, samples: int, data: st.DataObject
) -> None:
    whole = start + increment * times
    all_samples = data.draw(st.integers(1, samples + 2 * whole + 300))
    job = SAMPLES.replace("8100", str(all_samples))
    ramp = f"--global-batch-size {whole} --rampup-batch-size {start} {increment} {samples}"
    found = values(f"{ramp} --micro-batch-size 1", job)
    assert found["train.steps"] == megatrons_steps(start, increment, samples, whole, all_samples)
    assert found["train.rampup"] == {"start": start, "increment": increment, "samples": samples}
    assert found["schedule.decay_steps"] == all_samples / whole


@pytest.mark.parametrize(
    ("samples", "steps"), [(3, 1), (4, 2), (299, 46), (300, 47), (316, 47), (332, 48)]
)
def test_a_job_that_ends_within_its_ramp_up(samples: int, steps: int) -> None:
    """Steps are 25 of 4, 13 of 8, 8 of 12, and then of 16; all that begin by then are done."""
    assert values(RAMP, SAMPLES.replace("8100", str(samples)))["train.steps"] == steps


@pytest.mark.parametrize(
    ("ramp", "job", "said"),
    [
        ("4 4 300", JOB, "--rampup-batch-size wants --train-samples, as Megatron does"),
        ("4 4", SAMPLES, "--rampup-batch-size 4 4: wanted three whole numbers"),
        ("4 four 300", SAMPLES, "--rampup-batch-size 4 four 300: wanted three whole numbers"),
        ("4 4 0", SAMPLES, "--rampup-batch-size 4 4 0: wanted numbers more than 0"),
        ("16 4 300", SAMPLES, "leads from START to more, to --global-batch-size 16"),
        ("4 5 300", SAMPLES, "leads from START to more, to --global-batch-size 16"),
    ],
)
def test_ramp_ups_that_megatron_would_not_take(ramp: str, job: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        values(f"--global-batch-size 16 --rampup-batch-size {ramp}", job)


def test_a_ramp_up_that_the_script_alone_has_is_named() -> None:
    parsed = {"rampup_batch_size": ["4", "4", "300"]}
    assert agreement(f"{SAMPLES} {RAMP}".split(), parsed) == []
    assert agreement(SAMPLES.split(), parsed) == [
        "--rampup-batch-size: the script has 4 4 300, the run file None by Megatron's default of "
        "--rampup-batch-size; write --rampup-batch-size 4 4 300 into model.args"
    ]


def test_sources_name_the_words_or_the_default() -> None:
    found = derived_from(f"{SAMPLES} --lr-warmup-fraction 0.1".split())
    assert found["optimizer", "lr"].source == "--lr 1e-3"
    assert found["train", "seed"].source == "Megatron's default of --seed"
    assert found["train", "steps"].source == "--train-samples 8100 and --global-batch-size 8"
    assert found["optimizer", "lr"].at == ("model", "args")


def test_what_the_script_has_otherwise_is_named() -> None:
    words = f"{DATA} --data-path /a".split()
    parsed = {"seed": 1234, "lr": 1e-3, "data_path": ["/a"], "split": "969, 30, 1", "save": None}
    assert agreement(words, parsed) == []
    assert agreement(SAMPLES.split(), {"train_samples": 8100, "train_iters": 1012}) == []
    assert agreement(words, {**parsed, "seed": 1, "data_path": ["/b"]}) == [
        "--seed: the script has 1, the run file 1234 by Megatron's default of --seed; "
        "write --seed 1 into model.args",
        "--data-path: the script has /b, the run file ['/a'] by --data-path /a; "
        "write --data-path /b into model.args",
    ]


def test_without_evaluation_its_interval_is_whatever_the_script_has() -> None:
    words = ["--eval-iters", "0", "--global-batch-size", "4"]
    assert agreement(words, {"eval_iters": 0, "eval_interval": 1000}) == []
    (told,) = agreement(words, {"eval_iters": 0, "global_batch_size": 8})
    assert told.startswith("--global-batch-size: the script has 8, the run file 4 ")
    (told,) = agreement(["--eval-interval", "50"], {"eval_interval": 1000})
    assert told.startswith("--eval-interval: the script has 1000, the run file 50 ")


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys, liver_hpc.recipes.completion, liver_hpc.recipes.megatron_lm.arguments\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
