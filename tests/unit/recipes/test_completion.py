"""A run file is completed from its model section; what differs is told with both places."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cli.dry_run import describe_run
from liver_hpc.cli.main import main as liver
from liver_hpc.config.load import dump_run, load_run, parse_run
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.completion import load_users_run
from liver_hpc.recipes.megatron_lm.options import ScriptOptions
from tests.unit.config.runs import write_minimal
from tests.unit.recipes.megatron_lm.jobs import JOB, run_file


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_users_run(path, overrides)
    return [str(each).replace(str(path), "run.yaml") for each in caught.value.args]


def test_a_run_file_may_hold_nothing_of_what_follows(tmp_path: Path) -> None:
    config = load_users_run(run_file(tmp_path, "--eval-interval 50 --lr-warmup-iters 5"))
    assert (config.train.steps, config.train.global_batch, config.train.micro_batch) == (1000, 8, 2)
    assert (config.optimizer.lr, config.optimizer.beta2) == (1e-3, 0.999)
    assert (config.schedule.style, config.schedule.warmup_steps) == ("linear", 5)
    assert config.eval is not None
    assert (config.eval.every_steps, config.eval.steps) == (50, 100)
    assert config.data is None


def test_its_dump_is_complete_and_means_the_same_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "bpe.model").touch()
    path = run_file(
        tmp_path,
        "--save ckpt --save-interval 10 --data-path 1 data/a 2 data/b --tokenizer-metadata t.json "
        "--tokenizer-model tokens/bpe.model --vocab-file=v.json --merge-file s3://bucket/merges",
        job=JOB.replace("--mock-data", ""),
    )
    path.write_text(path.read_text().replace(f"{tmp_path}/pretrain", "pretrain"))
    config = load_users_run(path)
    monkeypatch.chdir("/")
    assert parse_run(dump_run(config)) == config
    assert config.model["script"] == str(tmp_path / "pretrain_gpt.py")
    words = config.model["args"]
    assert words[words.index("--save") + 1] == str(tmp_path / "ckpt")
    assert words[words.index("--data-path") + 1 :][:4] == [
        "1", str(tmp_path / "data/a"), "2", str(tmp_path / "data/b")
    ]  # fmt: skip
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path / "tokens/bpe.model")
    assert words[words.index("--tokenizer-metadata") + 1] == str(tmp_path / "t.json")
    assert f"--vocab-file={tmp_path}/v.json" in words
    assert "s3://bucket/merges" in words
    assert config.checkpoint.directory == tmp_path / "ckpt"
    assert load_recipe(config).derived(load_recipe(config).options) is not None


@pytest.mark.parametrize(
    ("tokenizer", "is_path"),
    [("bpe.model", True), ("tokens", True), ("gpt2", False), ("org/gpt2", False)],
)
def test_a_tokenizer_is_a_path_where_there_is_one_of_its_name(
    tokenizer: str, is_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for Megatron's tokenizers, which else take it for a name on a hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bpe.model").touch()
    (tmp_path / "tokens").mkdir()
    more = f"--tokenizer-model {tokenizer}"
    words = load_users_run(run_file(tmp_path, more)).model["args"]
    found = words[words.index("--tokenizer-model") + 1]
    assert found == (str(tmp_path / tokenizer) if is_path else tokenizer)


def test_present_and_equal_is_fine(tmp_path: Path) -> None:
    sections = "optimizer: {lr: 0.001}\ntrain: {steps: 1000, global_batch: 8}\n"
    config = load_users_run(run_file(tmp_path, sections=sections), ["train.seed=1234"])
    assert config.train.seed == 1234


def test_a_small_share_of_the_data_is_one(tmp_path: Path) -> None:
    more = "--data-path /a --split 0.99995,0.00005,0"
    data = load_users_run(run_file(tmp_path, more, job=JOB.replace("--mock-data", ""))).data
    assert data is not None
    assert data.shares == (0.99995, 0.00005, 0)


def test_a_part_of_what_follows_names_what_it_follows_from(tmp_path: Path) -> None:
    """Megatron itself asserts that weights are above 0."""
    path = run_file(tmp_path, "--data-path 0 /a 1 /b", job=JOB.replace("--mock-data", ""))
    assert problems(path) == [
        "run.yaml:4: model.args: --data-path 0 /a 1 /b: data.blend.0.weight: "
        "wanted a number more than 0, got 0.0"
    ]


def test_how_many_checkpoints_stay_is_the_run_files_to_say(tmp_path: Path) -> None:
    """Megatron keeps all."""
    path = run_file(tmp_path, "--save ckpt --save-interval 10")
    assert load_users_run(path).checkpoint.keep is None
    assert load_users_run(path, ["checkpoint.keep=3"]).checkpoint.keep == 3


def test_present_and_different_names_both_places_all_at_once(tmp_path: Path) -> None:
    sections = "optimizer:\n  lr: 0.01\ntrain:\n  steps: 20\ndata: {text: python-stdlib}\n"
    assert problems(run_file(tmp_path, sections=sections)) == [
        "run.yaml:9: optimizer.lr is 0.01, but run.yaml:4: model.args says --lr 1e-3: it is 0.001",
        "run.yaml:11: train.steps is 20, but run.yaml:4: model.args says --train-iters 1000: "
        "it is 1000",
        "run.yaml:12: data is {'text': 'python-stdlib'}, but run.yaml:4: model.args says "
        "--mock-data: there is none",
    ]


@pytest.mark.parametrize(
    "given",
    [
        "train.rampup={start: 4, increment: 2, samples: 300}",
        "train.rampup=5",
        "data.blend=5",
        "checkpoint.directory=7",
    ],
)
def test_what_differs_may_be_of_any_kind(given: str, tmp_path: Path) -> None:
    more = "--rampup-batch-size 4 4 300 --data-path 1 /a 2 /b --save /c --save-interval 10"
    job = JOB.replace("--mock-data", "").replace("--train-iters 1000", "--train-samples 8100")
    told, *_ = problems(run_file(tmp_path, more, job=job), given)
    assert told.startswith(f"--set {given} is ")
    assert ", but run.yaml:4: model.args says --" in told


def test_a_path_that_differs_may_name_a_user_that_there_is_not(tmp_path: Path) -> None:
    path = run_file(tmp_path, "--save /c --save-interval 10")
    assert problems(path, "checkpoint.directory=~nobody-here/x") == [
        "--set checkpoint.directory=~nobody-here/x is ~nobody-here/x, but run.yaml:4: model.args "
        "says --save /c: it is /c",
        "--set checkpoint.directory=~nobody-here/x: there is no home directory '~nobody-here'",
    ]


def test_an_override_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    assert problems(path, "optimizer.lr=1e-4", "train.seed=5") == [
        "--set train.seed=5 is 5, but run.yaml:4: model.args says Megatron's default of --seed: "
        "it is 1234",
        "--set optimizer.lr=1e-4 is 0.0001, but run.yaml:4: model.args says --lr 1e-3: it is 0.001",
    ]
    override = f"model.args={JOB.replace('1e-3', '1e-4')}".replace("\n", " ")
    assert load_users_run(path, [override, "optimizer.lr=1e-4"]).optimizer.lr == 1e-4


def test_a_derived_value_that_cannot_be_had_names_its_argument(tmp_path: Path) -> None:
    assert problems(run_file(tmp_path, "--adam-eps 0 --clip-grad -1")) == [
        "run.yaml:4: model.args: --adam-eps 0: optimizer.eps: wanted a number more than 0, got 0.0",
        "run.yaml:4: model.args: --clip-grad -1: optimizer.clip_grad: wanted a number at least 0, "
        "got -1.0",
    ]


def test_options_that_are_wrong_name_their_line(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    path.write_text(path.read_text().replace("  script:", "  scrip:"))
    assert problems(path)[1].startswith("run.yaml:3: model.scrip: unknown key")


def test_a_truth_is_no_word(tmp_path: Path) -> None:
    assert problems(run_file(tmp_path), "model.args=[--lr, yes]") == [
        "--set model.args=[--lr, yes]: wanted a word, got true; quote it"
    ]


def test_a_quote_that_is_not_closed_names_the_file_that_it_is_in(tmp_path: Path) -> None:
    path, words = run_file(tmp_path), tmp_path / "args.txt"
    words.write_text("--num-layers 2 --tokenizer-model 'a b\n")
    (said,) = problems(path, f"model.args={{file: {words}}}")
    assert said.endswith(f"{words}: wanted words as a shell has them: No closing quotation")


WORDS = r"""
# what was tried: --lr 3e-4 \
--save /ckpt/run#3 --lr 1e-4 \
  # --seed 7, don't \
  --tokenizer-model 'a #b' "c # d" \# d\ #e x#  # the rest " of it
--seed \
8
"""


def test_words_are_a_shell_s_and_comments_need_no_more_of_it(tmp_path: Path) -> None:
    words = tmp_path / "args.txt"
    words.write_text(WORDS)
    found = ScriptOptions.model_validate({"script": "a.py", "args": {"file": words}}).words
    wanted = ["--save", "/ckpt/run#3", "--lr", "1e-4", "--tokenizer-model", "a #b", "c # d", "#"]
    assert found == [*wanted, "d #e", "x#", "--seed", "8"]


@pytest.mark.parametrize("word", ["$CK", "${CK}/a", "/a/$1", "$(cat", "$@"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_word_that_a_shell_would_expand_is_refused(word: str, as_list: bool) -> None:
    args = ["--save", word] if as_list else f"--save '{word}'"
    with pytest.raises(ValueError, match=r"\$ is not expanded here; write what") as error:
        ScriptOptions.model_validate({"script": "a.py", "args": args})
    assert repr(word) in str(error.value)
    pattern = ScriptOptions.model_validate({"script": "a.py", "args": ["--own", "bias$"]})
    assert pattern.words == ["--own", "bias$"]


def test_a_recipe_that_derives_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = write_minimal(tmp_path)
    assert load_users_run(path) == load_run(path)


def test_dry_run_says_what_follows_from_what(tmp_path: Path) -> None:
    blend = " ".join(f"1 /data/part-{number}" for number in range(50))
    more = f"--data-path {blend}"
    config = load_users_run(run_file(tmp_path, more, job=JOB.replace("--mock-data", "")))
    shown = describe_run(config, load_recipe(config))
    told = [line for line in shown.splitlines() if line.startswith("#")]
    assert max(map(len, told)) < 240
    rows = [line.split() for line in shown.splitlines() if line.startswith("#  ")]
    assert ["#", "optimizer.lr", "0.001", "model.args:", "--lr", "1e-3"] in rows
    assert parse_run(shown) == config


def test_submit_refuses_and_tells_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run_file(tmp_path, "--fp16 --sft")
    assert liver(["submit", "--config", str(path), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "--fp16: not supported" in told
    assert "--sft: not supported" in told
    # What is told with the layouts' problems, before a model is built.
    path = run_file(tmp_path, "--log-interval 5 --tensor-model-parallel-size 2")
    assert liver(["submit", "--config", str(path), "--dry-run", "--set", "workers.initial=1"]) == 2
    told = capsys.readouterr().err
    assert "liver: note: model.args: the run's `layouts` decide" in told
    assert "liver: note: model.args: without effect here" in told
