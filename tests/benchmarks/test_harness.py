"""The harness: the order of repeats, and results as JSON and as a table."""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness import (
    BenchmarkResult,
    Spread,
    figure_text,
    interleaved,
    loss_difference,
    machine_facts,
    parser,
    report,
    reported,
    software_digest,
    write_json,
)
from liver_hpc.errors import LiverError

RESULT = BenchmarkResult(
    name="example",
    figures={"ratio": 12.5, "unknown": math.nan},
    rows=[{"case": "a", "took_s": 0.25, "equal": True}, {"case": "b", "took_s": 3, "equal": False}],
    method={"ratio": "restart over live"},
    spread={"ratio": Spread.of([12.5, 11.0, 14.0])},
    repeats=3,
)


def test_repeats_are_interleaved_there_and_back() -> None:
    counter = iter(range(100))
    values = interleaved({"a": lambda: next(counter), "b": lambda: next(counter)}, 3)
    assert values == {"a": [0, 3, 4], "b": [1, 2, 5]}


def test_json_holds_figures_machine_date_method_and_spread(tmp_path: Path) -> None:
    path = tmp_path / "made" / "r.json"
    write_json(RESULT, path)
    read = json.loads(path.read_text())
    assert read["figures"] == {"ratio": 12.5, "unknown": None}
    assert read["spread"]["ratio"] == {"count": 3, "median": 12.5, "low": 11.0, "high": 14.0}
    assert read["repeats"] == 3
    assert read["rows"] == list(RESULT.rows)
    assert read["machine"]["cores"] >= 1
    assert {
        "name",
        "figures",
        "machine",
        "date",
        "method",
        "repeats",
        "spread",
        "rows",
        "samples",
    } == set(read)
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_the_table_shows_every_figure_with_its_spread(tmp_path: Path) -> None:
    stream = io.StringIO()
    report(RESULT, tmp_path / "r.json", Console(file=stream, width=100))
    text = stream.getvalue()
    assert "12.5 (11 to 14), 3" in text
    assert "restart over live" in text
    cells = [line.split() for line in text.splitlines()]
    assert [row[-1] for row in cells if row[:1] == ["a"]] == ["yes"]


def test_a_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234567, "0.01235"), (3.0, "3"), (123.44, "123.4"), (98765.4, "98765"), (math.nan, "-")],
)
def test_figures_read_short(value: float, text: str) -> None:
    assert figure_text(value) == text


@pytest.mark.parametrize(("mine", "theirs"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_a_loss_that_is_no_number_is_no_small_difference(mine: float, theirs: float) -> None:
    with pytest.raises(LiverError, match=r"step 1: wanted two numbers, got .*(nan|inf)"):
        loss_difference({0: 1.0, 1: mine, 2: mine}, {0: 1.00001, 1: theirs, 2: 1.0})


def test_machine_facts_name_the_versions() -> None:
    assert "torch" in machine_facts()


def test_the_software_is_another_one_when_any_of_its_files_is(tmp_path: Path) -> None:
    tree = tmp_path / "ours"
    tree.mkdir()
    (tree / "a.py").write_text("x = 1\n")
    before = software_digest([tree])
    (tree / "notes.txt").write_text("not code")
    assert software_digest([tree]) == before
    (tree / "a.py").write_text("x = 2\n")
    changed = software_digest([tree])
    (tree / "b.py").write_text("")
    assert len({before, changed, software_digest([tree])}) == 3
    assert software_digest() == software_digest()


def test_options_that_all_benchmarks_have() -> None:
    options = parser("example", "").parse_args(["--quick", "--json", "r.json"])
    assert (options.quick, options.json) == (True, Path("r.json"))


def test_what_a_benchmark_starts_finds_the_package_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart starts more processes than a handoff: it would pay more for what no user pays."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def measure() -> BenchmarkResult:
        says = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
        found = subprocess.run(says, capture_output=True, text=True, check=True).stdout
        return BenchmarkResult("child", {"compiles_anew": float(found == "True\n")})

    seen: list[BenchmarkResult] = []
    monkeypatch.setattr("benchmarks.harness.report", lambda result, _: seen.append(result))

    assert reported(measure, argparse.Namespace(quick=False, json=None)) == 0

    (result,) = seen
    assert result.figures == {"compiles_anew": 0.0}


@pytest.mark.parametrize(
    ("name", "said"), [("", "is a directory"), ("file/r.json", "cannot be written: File exists")]
)
def test_a_result_that_could_not_be_written_is_refused_before_it_is_measured(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    given = argparse.Namespace(quick=False, json=tmp_path / name)

    assert reported(lambda: pytest.fail("was measured"), given) == 1

    told = capsys.readouterr().err
    assert told.startswith(f"error: --json {tmp_path / name} {said}")
