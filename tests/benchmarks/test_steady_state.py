"""The steady state's benchmark: its arithmetic, and one small run of both sides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.steady_state.__main__ import loss_difference, main, periods
from benchmarks.steady_state.sides import Step

STEPS = [Step(number, ended_s, 2.0) for number, ended_s in enumerate([1.0, 1.5, 2.0, 9.0, 9.5])]


def test_only_steps_that_lie_in_the_block_count() -> None:
    assert periods(STEPS, 0.0, 10.0) == [0.5, 0.5, 7.0, 0.5]
    assert periods(STEPS, 1.2, 9.2) == [0.5, 7.0]
    assert periods(STEPS, 1.0, 2.0) == [0.5, 0.5]
    assert periods(STEPS, 8.0, 8.5) == []


def test_losses_are_compared_step_by_step() -> None:
    assert loss_difference(STEPS, [Step(0, 0.0, 2.0), Step(1, 0.0, 4.0)]) == 0.5
    assert math.isnan(loss_difference([], STEPS))


@pytest.mark.timeout(240)
def test_both_sides_train_the_same(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["figures"]["loss_difference"] < 1e-4
    assert written["figures"]["overhead_percent"] is not None
    assert {row["side"] for row in written["rows"]} == {"liver_hpc", "plain"}
    assert all(row["steps"] > 0 for row in written["rows"])
