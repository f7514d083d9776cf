"""Differences of losses, step by step."""

from __future__ import annotations

import math

import pytest

from benchmarks.convergence.__main__ import FULL, config_of, differences, result
from liver_hpc.cli.check import check_run
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.records import RunRecords
from tests.unit.layout.models import gpt_recipe
from tests.unit.report.rows import reconfiguration, step


def run_of(losses: list[float], *attempts: str) -> RunRecords:
    steps = [step(number, loss=loss) for number, loss in enumerate(losses)]
    return RunRecords(steps, [reconfiguration(outcome=outcome) for outcome in attempts], [], {})


def test_the_worst_step_is_the_figure_and_the_control_stands_beside_it() -> None:
    fixed = run_of([4.0, 2.0, 1.0])
    found = result(run_of([4.0, 2.002, 1.0], "completed"), fixed, run_of([4.0, 2.0, 1.01])).figures
    assert found["max_relative_loss_difference"] == pytest.approx(1e-3)
    assert found["control_max_relative_loss_difference"] == pytest.approx(1e-2)
    assert found["final_relative_loss_difference"] == 0.0
    assert found["handoffs"] == 1


def test_a_step_done_again_counts_as_it_was_done_last() -> None:
    again = RunRecords([step(0, loss=9.0), step(0, loss=4.0)], [], [], {})
    assert differences(again, run_of([4.0])) == [0.0]


def test_steps_that_only_one_run_has_done_are_left_out() -> None:
    assert differences(run_of([4.0]), run_of([4.0, 2.0])) == [0.0]


def test_a_step_that_was_not_recorded_is_no_measurement() -> None:
    holed = RunRecords([step(0, loss=4.0), step(2, loss=4.0)], [], [], {})
    with pytest.raises(LiverError, match=r"steps \[1\] were not recorded"):
        differences(holed, run_of([4.0, 4.0, 4.0]))


def test_a_loss_that_is_no_number_is_no_measurement() -> None:
    with pytest.raises(LiverError, match=r"step 1: .*nan"):
        differences(run_of([4.0, math.nan, 1.0]), run_of([4.0, 2.0, 1.0]))


def test_an_aborted_handoff_is_no_measurement() -> None:
    with pytest.raises(LiverError, match="aborted"):
        result(run_of([4.0], "aborted"), run_of([4.0]), run_of([4.0]))


@pytest.mark.parametrize("first", ["dp2", "tp2"])
def test_the_runs_pass_the_checks_and_begin_where_they_shall(first: str) -> None:
    config = config_of(FULL, Layout.parse(first))
    assert config.allowed_layouts(2)[0] == Layout.parse(first)
    check_run(config, gpt_recipe(config), [])
