"""The steady state's benchmark: its arithmetic, and one small run of both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.steady_state.__main__ import (
    Block,
    interference,
    main,
    pairs_percent,
    periods,
)
from benchmarks.steady_state.sides import Step
from liver_hpc.report.derive import run_figures
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import reconfiguration, step

STEPS = [Step(number, ended_s, 2.0) for number, ended_s in enumerate([1.0, 1.5, 2.0, 9.0, 9.5])]


def test_only_steps_that_lie_in_the_block_count() -> None:
    assert periods(STEPS, 0.0, 10.0) == [0.5, 0.5, 7.0, 0.5]
    assert periods(STEPS, 1.2, 9.2) == [0.5, 7.0]
    assert periods(STEPS, 1.0, 2.0) == [0.5, 0.5]
    assert periods(STEPS, 8.0, 8.5) == []


def block(cpu_s: float, steps: int = 10) -> Block:
    return Block(1.0, steps, steps, cpu_s)


def test_overhead_is_the_median_of_pairs() -> None:
    """The machine slows down: pairs agree, what all blocks took together would not."""
    plain = [block(1.0), block(2.0), block(4.0), block(4.0, steps=0)]
    live = [block(1.01), block(2.06), block(4.08), block(4.0)]
    blocks = {"liver_hpc": live, "plain": plain}
    found = pairs_percent(blocks, lambda each: each.a_step(each.cpu_s))
    assert found.count == 3, "one has no step to compare"
    assert found.median == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((1.0, 3.0))


def test_interference_is_told_of_handoffs_with_and_without_joiners() -> None:
    steps = [step(0), step(1), step(2, took_s=1.5, phase="prepare")]
    steps += [step(3, started_s=103.75, generation=1, phase="first")]
    steps += [step(n, started_s=100.75 + n, generation=1) for n in (4, 5)]
    times = {"step": 3, "source_last_step_ended_s": 103.5, "first_step_ended_s": 104.75}
    for workers, prefix in (("1,0", ""), ("0,2", "join_")):
        attempt = reconfiguration(target_workers=workers, **times)
        figures = run_figures(RunRecords(steps, [attempt], [], {}))
        found = interference(figures.reconfigurations)
        assert list(found) == [f"{prefix}interference_steps", f"{prefix}cost_steps"]
        assert found[f"{prefix}interference_steps"].median == pytest.approx(0.5)
        assert found[f"{prefix}cost_steps"].median == pytest.approx(0.75)


@pytest.mark.long
@pytest.mark.timeout(360)
def test_both_sides_train_the_same(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["figures"]["loss_difference"] < 1e-4
    assert written["figures"]["overhead_percent"] is not None
    assert written["spread"]["cpu_overhead_percent"]["count"] > 0
    assert written["spread"]["cost_steps"]["count"] == 2
    assert written["spread"]["join_cost_steps"]["count"] == 1
    assert {row["side"] for row in written["rows"]} == {"liver_hpc", "plain"}
    assert all(row["steps"] > 0 for row in written["rows"])
