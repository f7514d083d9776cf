"""Plots as files, and what may go wrong with the files."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.report.command import draw
from liver_hpc.report.derive import run_figures
from liver_hpc.report.drawings import run
from liver_hpc.report.drawings.canvas import Color
from liver_hpc.report.drawings.training import timeline
from liver_hpc.report.page import document
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import reconfiguration, step
from tests.unit.report.run_of_everything import everything


def test_all_plots_are_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(everything(), None, tmp_path / "new" / "plots")
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = ["training", "nodes", "baselines", "handoff-1", "handoff-2", "handoff-3"]
    assert [path.name for path in written] == [f"{name}.png" for name in names]
    for path in written:
        picture = matplotlib.image.imread(path)
        assert picture.shape[0] > 150
        assert picture.min() < 0.5 < picture.max()


def test_a_run_without_anything_has_a_plot(tmp_path: Path) -> None:
    draw(RunRecords([], [], [], {}), None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["training.png"]


def test_page_and_plots_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "r.html"
    page.write_text("an older one")
    draw(everything(), page, tmp_path)
    assert capsys.readouterr().out.startswith(f"{page}\n{tmp_path}/training.png\n")
    assert page.read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone/r\.html cannot be written: No such file"):
        draw(everything(), tmp_path / "gone" / "r.html", None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/training\.png cannot be written: File exists"):
        draw(everything(), None, tmp_path / "file")


def test_tables_need_no_matplotlib() -> None:
    code = (
        "import sys, liver_hpc.report.command, liver_hpc.report.report, liver_hpc.report.store\n"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "False"


def test_the_first_step_of_a_start_does_not_take_the_time_since_the_one_before() -> None:
    """As after a job that was queued again with nothing to be done again; a handoff's does."""
    steps = [step(0), step(1, generation=1, started_s=103.0)]
    steps += [step(2, generation=3, started_s=36103.0)]
    times = timeline(RunRecords(steps, [reconfiguration()], [], {}), [])
    assert [*times.began_s] == [0.0, 1.0, 36003.0]


def test_a_loss_that_is_never_finite_is_marked(tmp_path: Path) -> None:
    losses = [math.nan, math.inf, -math.inf]
    steps = [step(n, loss=loss, grad_norm=loss) for n, loss in enumerate(losses)]
    draw(RunRecords(steps, [], [], {}), None, tmp_path / "marked")
    draw(RunRecords([step(0)], [], [], {}), None, tmp_path / "plain")
    marked, unmarked = (
        matplotlib.image.imread(tmp_path / name / "training.png") for name in ("marked", "plain")
    )
    assert red_pixels(marked[: len(marked) // 2]) > red_pixels(unmarked[: len(unmarked) // 2])


def test_of_very_many_handoffs_the_costliest_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MOST_HANDOFFS", 1)
    monkeypatch.setattr(document, "MOST_HANDOFFS", 1)
    records = everything()
    page = tmp_path / "r.html"
    draw(records, page, tmp_path)
    cost_s = {
        f"handoff-{one.generation}": one.cost_s for one in run_figures(records).reconfigurations
    }
    costliest = max(cost_s, key=lambda name: cost_s[name] if math.isfinite(cost_s[name]) else -1.0)
    assert [path.stem for path in tmp_path.glob("handoff-*.png")] == [costliest]
    assert f"The 1 costliest of {len(cost_s)} handoffs are drawn." in page.read_text()


def red_pixels(picture: Any) -> int:
    """How many pixels have the marks' colour."""
    red = matplotlib.colors.to_rgb(Color.BAD)
    return int((abs(picture[..., :3] - red) < 0.02).all(axis=-1).sum())
