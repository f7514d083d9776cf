"""The benchmark of a handoff's memory: one small run of either mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory.__main__ import main
from benchmarks.summary.words import FIGURES
from liver_hpc.config.schema import HandoffSection


@pytest.mark.timeout(180)
def test_the_quick_run_tells_what_either_mode_takes(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    figures = written["figures"]
    assert figures.keys() == FIGURES["memory"].keys()
    assert [row["mode"] for row in written["rows"]] == ["both", "bounded"]
    both, bounded = written["rows"]
    # Staging is as large as so small a world.
    assert bounded["peak_bytes"] < 1.1 * (bounded["world_bytes"] + HandoffSection().staging_bytes)
    assert both["peak_bytes"] > bounded["peak_bytes"] + 0.1 * both["world_bytes"]
    assert figures["handoff_peak_over_max_world"] == bounded["peak_over_world"]
    assert figures["handoff_peak_over_max_world_both"] == both["peak_over_world"]
