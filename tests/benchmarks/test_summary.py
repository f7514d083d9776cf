"""Results as a section of a page."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import BenchmarkResult, reported, write_json
from benchmarks.reconfigure.figures import result
from benchmarks.reconfigure.sweep import load_sweep
from benchmarks.summary.__main__ import BEGIN, END, main
from benchmarks.summary.words import FIGURES
from benchmarks.transitions.__main__ import figures


@pytest.fixture
def sweep_json(configs: Path, tmp_path: Path) -> Path:
    """Two repeats of one transition, live and restarted."""
    rows = [
        {
            "size": "25m",
            "transition": "grow",
            "method": method,
            "lost_s": lost_s + 0.01 * number,
            "median_step_s": 0.1,
            "slowdown_s": 0.5,
            "reconfiguration_s": 9.0,
            "detection_s": 0.0,
            "bytes": 1000,
            "variant": "",
            "round": number,
        }
        for method, lost_s in (
            ("live", 0.02),
            ("dist_checkpointing", 10.0),
            ("dist_checkpointing, exists", 8.0),
        )
        for number in range(2)
    ]
    path = tmp_path / "r.json"
    write_json(result(load_sweep(configs / "bench" / "local.yaml"), rows), path)
    return path


def test_the_section_is_written_between_its_lines(sweep_json: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\n# After\n", encoding="utf-8")
    assert main([str(sweep_json), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n{BEGIN}\nMeasured on: ")
    assert text.endswith(f"{END}\n# After\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| 25m | grow |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:6] == ["0.525 (0.52 to 0.53)", "0.025 (0.02 to 0.03)", "0.25", "10 (10 to 10)"]
    assert cells[6:] == ["400.2", "19.06", "8.00", "-", "9.0 / 9.0"]
    assert "| `speedup_min` | 400.2 |" in text
    assert main([str(sweep_json), "--page", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["performance.md", "axes.md"])
def test_pages_have_the_section(name: str, repository: Path) -> None:
    page = repository / "docs" / "explanation" / name
    _, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    assert begin
    assert "Measured on: " in rest.partition(END)[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "stream"}'])
def test_what_is_no_result_is_told(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.json"
    path.write_text(text, encoding="utf-8")
    assert main([str(path)]) == 2
    assert f"error: {path}: wanted a benchmark's result" in capsys.readouterr().err


def test_a_page_without_the_lines_is_left_alone(sweep_json: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Mine\n", encoding="utf-8")
    assert main([str(sweep_json), "--page", str(page)]) == 2
    assert page.read_text(encoding="utf-8") == "# Mine\n"


def written(path: Path, name: str, quick: bool = False, **machine: object) -> Path:
    """A benchmark's result, as its command leaves it."""
    facts: Any = {"processor": "EPYC", "cores": 64, "memory_bytes": 2**40, **machine}
    found = BenchmarkResult(name, dict.fromkeys(FIGURES[name], 1.0), machine=facts)
    assert reported(lambda: found, Namespace(quick=quick, json=path)) == 0
    return path


def test_what_was_made_with_quick_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path / "g.json", "goodput"))]) == 0
    assert main([str(written(tmp_path / "q.json", "goodput", quick=True))]) == 2
    assert "q.json: wanted a measurement, it was made with --quick" in capsys.readouterr().err


def test_each_figure_says_on_which_of_several_machines_it_was_measured(
    sweep_json: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goodput = written(tmp_path / "g.json", "goodput", processor="Xeon")
    stream = written(tmp_path / "s.json", "stream")
    capsys.readouterr()
    assert main([str(goodput), str(stream), str(sweep_json)]) == 0
    text = capsys.readouterr().out
    assert "Measured on: (1) Xeon" in text
    assert "And on: (2) EPYC" in text
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    for name, number in (("goodput_live", 1), ("link_share", 2), ("speedup_min", 3)):
        (line,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        assert line.endswith(f". Measured on ({number}). |")
    assert text.count("Measured on (3).") == 1 + sum("(3)" in line for line in lines)


def test_two_results_of_one_benchmark_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(written(tmp_path / f"{name}.json", "goodput")) for name in "ab"]
    assert main(paths) == 2
    assert "one result of each benchmark, got several: ['goodput']" in capsys.readouterr().err


def test_a_restart_is_not_so_many_times_a_cost_below_zero(
    sweep_json: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(sweep_json.read_text(encoding="utf-8"))
    (live,) = (row for row in document["rows"] if row["method"] == "live")
    live["cost_s"] = -5.0
    sweep_json.write_text(json.dumps(document), encoding="utf-8")
    assert main([str(sweep_json)]) == 0
    assert "| 400.2 | - | 8.00 |" in capsys.readouterr().out


def figures_of(benchmark: str, document: dict[str, Any]) -> set[str]:
    return set(document["figures"]) & set(FIGURES[benchmark])


def test_figures_that_there_are_words_for_exist(sweep_json: Path) -> None:
    document = json.loads(sweep_json.read_text(encoding="utf-8"))
    assert figures_of("reconfigure", document) == set(FIGURES["reconfigure"]) - {
        "lost_steps_max_100m"
    }


def test_a_sweep_is_told_with_its_machine_and_the_attempts_that_failed(
    sweep_json: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(sweep_json.read_text(encoding="utf-8"))
    assert main([str(sweep_json)]) == 0
    text = capsys.readouterr().out
    assert "failed" not in text
    assert "of 2 repeats, interleaved." in text
    del document["method"]["order"]
    document["method"]["array"] = "tasks, 4 at a time"
    document["name"] = "reconfigure-slurm"
    document["figures"]["failed_attempts"] = 3.0
    document["machine"] = {"processor": "EPYC", "cores": 64, "memory_bytes": 2**40}
    sweep_json.write_text(json.dumps(document), encoding="utf-8")
    assert main([str(sweep_json)]) == 0
    text = capsys.readouterr().out
    assert "Measured on: EPYC, 64 cores, 1024 GiB" in text
    assert "Array: tasks, 4 at a time." in text
    assert "of 2 repeats. Attempts to measure a cell that failed: 3." in text
    assert "| `speedup_min` | 400.2 |" in text


def test_transitions_are_counted_by_axis_and_by_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(model: str, axes: str, back: bool, apart: float) -> dict[str, Any]:
        held = {"there": True, "back": back, "same_layout": True, "uneven": axes == "dp"}
        return {"model": model, "axes": axes, "apart": apart, **held}

    rows = [
        row("dense", "tp pp", True, 1e-7),
        row("dense", "dp", False, 0.5),
        row("dense, bf16", "tp", True, 0.002),
    ]
    write_json(BenchmarkResult("transitions", figures(rows), rows), tmp_path / "t.json")
    assert main([str(tmp_path / "t.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| `tp` | 2 | 2 | 1e-07 | 0.002 |" in lines
    assert "| `dp` | 1 | 0 | 0.5 |  |" in lines
    assert "| two axes or more | 1 | 1 | 1e-07 |  |" in lines
    assert "| an uneven batch | 1 | 0 | 0.5 |  |" in lines
    assert "| dense, bf16 | 1 | 1 |  | 0.002 |" in lines
    assert any(line.startswith("| `bit_equal` | 2 |") for line in lines)
