"""The simulation's benchmark on a fit that is known."""

from __future__ import annotations

from benchmarks.simulate.__main__ import QUICK, run
from tests.benchmarks.simulate.test_timings import KNOWN


def test_figures_are_possible_ones() -> None:
    result = run(KNOWN, QUICK)
    assert result.figures["model_error_median"] < 1e-6
    assert result.figures["simulated_pause_s_1024"] > 0
    assert result.figures["control_messages_per_worker"] > 5
    assert all(row["lost_s"] >= row["pause_s"] > 0 for row in result.rows)
    assert all(0 < row["goodput"] <= 1 for row in result.rows)
