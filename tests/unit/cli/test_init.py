"""`liver init`: files that `liver submit --dry-run` takes, of flags, answers and defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml

from liver_hpc.cli import init as init_module
from liver_hpc.cli.options import new_parser
from liver_hpc.config.load import load_run, schema_text
from liver_hpc.errors import ConfigError
from tests.unit.cli.test_main import Captured, liver


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs))


ON_SLURM = ["--partition", "gpu", "--gpus-per-node", "8", "--workers", "8"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--steps", "50", "--batch", "6", "--workers", "1"],
        ["--data", "corpus/*.txt", "--max-workers", "2"],
        ["--cluster", "slurm", "--workers", "3", "--max-workers", "7"],
        ON_SLURM,
        [*ON_SLURM, "--burst-partition", "preempt", "--max-workers", "32"],
    ],
    ids=" ".join,
)
def test_what_is_written_passes_the_checks(flags: list[str], capsys: Captured) -> None:
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("text " * 1000)
    assert liver("init", "--defaults", *flags) == 0
    assert "next: liver submit --config run.yaml --dry-run" in capsys.readouterr().out
    assert liver("submit", "--config", "run.yaml", "--dry-run") == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("# nothing was launched\n")
    assert shown.err == ""
    assert list(_problems(Path("run.yaml"))) == []


def test_a_node_with_gpus_has_a_worker_on_each_and_burst_nodes_come_beside_it() -> None:
    flags = ["--cluster", "slurm", "--burst-partition", "preempt", "--gpus-per-node", "8"]
    assert liver("init", "--defaults", *flags) == 0
    found = yaml.safe_load(Path("run.yaml").read_text())
    assert found["workers"] == {"initial": 8, "max": 16}
    slurm = found["cluster"]["slurm"]
    assert slurm["burst"]["max_nodes"] == 1
    assert [part["cpus_per_node"] for part in (*slurm["components"], slurm["burst"])] == [32, 32]


def test_a_burst_partition_that_would_have_no_node_is_refused(capsys: Captured) -> None:
    flags = [*ON_SLURM, "--max-workers", "8", "--burst-partition", "preempt"]
    assert liver("init", "--defaults", *flags) == 2
    assert "no more nodes than the 1 at the start: --burst-partition would have none" in (
        capsys.readouterr().err
    )


def _problems(path: Path) -> Iterator[str]:
    """By the schema that the file names."""
    first, _, text = path.read_text().partition("\n")
    schema = json.loads((path.parent / first.partition("$schema=")[2]).read_text())
    values = json.loads(json.dumps(yaml.safe_load(text)))  # keys of numbers are texts there
    yield from (
        error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(values)
    )


def test_a_pair_of_files_is_a_prefix() -> None:
    for end in (".bin", ".idx"):
        Path(f"corpus{end}").touch()
    assert liver("init", "--data", "corpus") == 0
    assert yaml.safe_load(Path("run.yaml").read_text())["data"] == {"prefix": "corpus"}


def test_a_script_of_megatron_lm() -> None:
    for name in ("a b.py", "args.txt"):
        Path(name).touch()
    flags = ["--recipe", "megatron-lm", "--script", "a b.py", "--args", "args.txt"]
    assert liver("init", "job.yaml", *flags, "--workers", "4") == 0
    found = yaml.safe_load(Path("job.yaml").read_text())
    assert found["model"] == {"script": "a b.py", "args": {"file": "args.txt"}}
    assert (found["name"], found["workers"]) == ("job", {"initial": 4, "max": 8})
    assert found["layouts"] == {1: {"dp": 1}, 2: {"dp": 2}, 4: {"dp": 4}, 8: {"dp": 8}}
    assert "train" not in found
    assert list(_problems(Path("job.yaml"))) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--recipe", "megatron-lm"], "--recipe megatron-lm wants --script"),
        (["--script", "x.py"], "--script belongs to --recipe megatron-lm, got --recipe gpt"),
        (
            ["--cluster", "local", "--partition", "p"],
            "--partition belongs to --cluster slurm, got --cluster local",
        ),
        (
            ["--workers", "4", "--max-workers", "2"],
            "--max-workers 2: fewer than the 4 at the start",
        ),
        (["--max-workers", "500"], "--max-workers 500: a local run on this machine may have "),
        (["--data", "gone/*.txt"], "--data gone/*.txt: no file matches 'gone/*.txt'"),
        (
            ["--recipe", "megatron-lm", "--script", "gone.py", "--args", "a.txt"],
            "--script gone.py: there is no file 'gone.py'",
        ),
        (
            ["--recipe", "megatron-lm", "--script", "~nobody-here/x.py", "--args", "a.txt"],
            "there is no file '~nobody-here/x.py'",
        ),
        ([".", "--force"], ". is a directory; name the file"),
        (["gone/run.yaml"], "gone/run.yaml cannot be written: No such file or directory"),
        (["--workers", "none"], "wanted a whole number of at least 1, got 'none'"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], said: str, capsys: Captured) -> None:
    assert liver("init", *flags) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["programs"]


def test_a_run_is_named_after_its_file_or_its_directory(tmp_path: Path) -> None:
    assert liver("init", "--defaults") == 0
    assert liver("init", "mine.yaml", "--defaults") == 0
    names = [yaml.safe_load(Path(file).read_text())["name"] for file in ("run.yaml", "mine.yaml")]
    assert names == [tmp_path.name, "mine"]


@pytest.mark.parametrize("name", ["3e-4", "1.e5", "on", "0123"])
def test_what_looks_like_another_value_is_written_as_a_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "run.yaml"
    path.parent.mkdir()
    assert liver("init", str(path), "--defaults", "--partition", name) == 0
    config = load_run(path)
    assert (config.name, config.cluster.slurm.components[0].partition) == (name, name)


@pytest.mark.parametrize("pattern", ["text/[0-9]*.txt", "text/1,2.txt"])
def test_a_pattern_is_one_text_whatever_is_in_it(pattern: str) -> None:
    Path("text").mkdir()
    Path("text/1,2.txt").write_text("words")
    assert liver("init", "--defaults", "--data", pattern) == 0
    data = load_run(Path("run.yaml")).data
    assert data is not None
    assert data.text == [pattern]


def test_a_file_that_is_there_stays(capsys: Captured) -> None:
    Path("run.yaml").write_text("mine")
    assert liver("init") == 2
    assert "run.yaml is there already; --force writes over it" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"
    assert liver("init", "--force") == 0
    assert Path("run.yaml").read_text() != "mine"


class Asked:
    """Answers in a terminal, and what was asked."""

    def __init__(self, *answers: str) -> None:
        self.questions: list[str] = []
        self._answers = iter(answers)

    def __call__(self, question: str) -> str:
        self.questions.append(question.partition(" [")[0])
        try:
            return next(self._answers)
        except StopIteration:
            raise EOFError from None


@pytest.fixture
def _in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_module, "in_terminal", lambda: True)


@pytest.mark.usefixtures("_in_terminal")
def test_in_a_terminal_what_no_flag_says_is_asked(capsys: Captured) -> None:
    answers = ("gpt", "no such file", "", "slurm?", "slurm", "big", "", "four", "4", "2", "", "700")
    asked = Asked(*answers, "")
    init_module.init(new_parser().parse_args(["init", "--workers", "8"]), asked)
    assert asked.questions[3] == "Where it runs (local, slurm)"
    assert "Workers at the start" not in asked.questions
    found = yaml.safe_load(Path("run.yaml").read_text())
    assert found["train"] == {"steps": 700, "global_batch": 16}
    main, more = found["cluster"]["slurm"]["components"]
    assert (main["partition"], main["nodes"], main["gpus_per_node"]) == ("big", 2, 4)
    assert (more["join"], more["nodes"]) == ("asked", 2)
    out = capsys.readouterr().out
    assert "no file matches 'no such file'" in out
    assert "fewer than the 8 at the start" in out
    assert "wanted local or slurm, got 'slurm?'" in out
    assert "wanted a whole number of at least 1, got 'four'" in out


@pytest.mark.usefixtures("_in_terminal")
def test_nothing_is_written_where_the_answers_end() -> None:
    with pytest.raises(ConfigError, match="there are no more answers; nothing was written"):
        init_module.init(new_parser().parse_args(["init"]), Asked("gpt"))
    assert not Path("run.yaml").exists()


@pytest.mark.usefixtures("_in_terminal")
def test_defaults_ask_nothing_in_a_terminal() -> None:
    asked = Asked()
    init_module.init(new_parser().parse_args(["init", "--defaults"]), asked)
    assert asked.questions == []


# ---- the schema


def test_the_schema_is_printed(capsys: Captured) -> None:
    assert liver("schema") == 0
    assert capsys.readouterr().out == schema_text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"trian": {}},
        {"train": {"steps": 0, "global_batch": 8}},
        {"train": {"steps": 1}},
        {"model": {"layerz": 2}},
        {"layouts": {"2": {"tq": 2}}},
        {"layouts": {"two": {"tp": 2}}},
        {"layouts": "some"},
        {"recipe": "liver_hpc.recipes.megatron_lm:Pretrain", "model": {"layers": 2}},
    ],
    ids=str,
)
def test_an_editor_would_mark_what_is_wrong(wrong: dict[str, object]) -> None:
    right = {
        "train": {"steps": 1, "global_batch": 8},
        "workers": {"initial": 1, "max": 2},
        "layouts": {"1": {"dp": 1}, "2": [{"tp": 2}]},
    }
    judge = jsonschema.Draft202012Validator(json.loads(schema_text()))
    assert judge.is_valid(right)
    assert judge.is_valid({**right, "recipe": "mine:Own", "model": {"anything": 1}})
    assert not judge.is_valid({**right, **wrong})
