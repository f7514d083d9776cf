"""Goodput of measured runs, and of a day under what their changes cost."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.goodput.__main__ import (
    LARGE,
    QUICK,
    SMALL,
    Lived,
    Trace,
    config_of,
    live_costs,
    lived,
    result,
)
from benchmarks.goodput.trace import DAY_S
from liver_hpc.cli.check import check_run
from liver_hpc.errors import LiverError
from liver_hpc.report.traces import Cost
from liver_hpc.run.records import RunRecords
from tests.unit.layout.models import gpt_recipe
from tests.unit.report.rows import reconfiguration, step


def live_records(outcome: str = "completed") -> RunRecords:
    steps = [step(i) for i in range(10)]
    steps += [step(10, generation=1, phase="first", started_s=110.5)]
    steps += [step(11 + i, generation=1, started_s=111.5 + i) for i in range(9)]
    attempt = reconfiguration(
        outcome=outcome,
        notice_s=105.0,
        source_last_step_ended_s=110.0,
        first_step_ended_s=111.5,
    )
    return RunRecords(steps, [attempt], [], {})


def test_figures_of_a_run_and_of_its_trace_under_the_measured_costs() -> None:
    records = live_records()
    live = lived(records, live_costs(records))
    assert live.costs == (Cost(0.5, 6.5),)
    restart = Lived(0.4, 30.0, (Cost(5.0, 6.0), Cost(7.0, 8.0)))
    found = result(QUICK, {"live": [live], "restart": [restart]}).figures
    assert found["goodput_live"] == pytest.approx(20.0 / 20.5)
    assert found["goodput_restart"] == 0.4
    assert found["goodput_live_day"] == pytest.approx(1 - 47 * 0.5 / DAY_S)
    assert found["goodput_restart_day"] == pytest.approx(1 - (24 * 5 + 23 * 7) / DAY_S)


def test_of_events_that_wait_the_last_is_answered() -> None:
    scale = replace(QUICK, events=4, gap_s=0.1)
    targets = Trace(scale).targets()
    assert next(targets) == LARGE
    time.sleep(0.35)  # the next two have come meanwhile, and then the last one
    assert list(targets) == [SMALL]


def test_an_aborted_handoff_is_no_measurement() -> None:
    with pytest.raises(LiverError, match="aborted"):
        live_costs(live_records("aborted"))


def test_the_run_passes_the_checks() -> None:
    config = config_of(QUICK)
    check_run(config, gpt_recipe(config), [])
