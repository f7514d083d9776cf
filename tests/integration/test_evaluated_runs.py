"""Runs that are evaluated: the validation losses around handoffs are those of a run without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import RunRecords, read_run
from tests.integration.elastic import elastic_run
from tests.integration.runs import ENDLESS, run_config, start, stop_and_read, watch
from tests.integration.test_checkpoint import go_on
from tests.integration.test_kinds_of_state import stopped
from tests.integration.worlds import apart

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

EVERY = {"every_steps": 2, "steps": 2}
FIVE_HANDOFFS = [
    {"at_step": 4, "layout": {"tp": 2, "dp": 2}},
    {"at_step": 5, "layout": {"pp": 2, "dp": 2}},
    {"at_step": 6, "replace": 1},
    {"at_step": 7, "layout": {"tp": 2}},
    {"at_step": 8, "layout": {"tp": 2, "dp": 2}},
]


def evaluations(records: RunRecords) -> dict[int, float]:
    assert len({each.step for each in records.evaluations}) == len(records.evaluations)
    return {each.step: each.loss for each in records.evaluations}


@pytest.mark.long
def test_validation_losses_around_five_handoffs_are_those_of_a_fixed_run(tmp_path: Path) -> None:
    elastic = elastic_run(tmp_path, FIVE_HANDOFFS, eval=EVERY)
    assert [each.outcome for each in elastic.reconfigurations] == ["completed"] * 5
    # As long a run, since the samples of validation are numbered behind those of training.
    run = start(run_config(tmp_path, ENDLESS, eval=EVERY))
    watch(run, lambda status: status.evaluated >= elastic.evaluations[-1].step, 150.0)
    found, expected = evaluations(elastic), evaluations(stop_and_read(run))
    done = len(elastic.steps)
    assert found.keys() - {done} == {*range(2, done, 2)}, "none is done where a run is stopped"
    assert apart([(*found.values(),)], [tuple(expected[step] for step in found)]) <= 1e-5
    worlds = {each.generation for each in elastic.evaluations}
    assert len(worlds) >= 4
    _check_that_no_evaluation_counts_as_lost_or_as_a_step(elastic)


def _check_that_no_evaluation_counts_as_lost_or_as_a_step(elastic: RunRecords) -> None:
    spans = [(each.started_s, each.ended_s) for each in elastic.evaluations]
    for step in elastic.steps:
        assert not any(begin < step.ended_s and step.started_s < end for begin, end in spans)
    for attempt in run_figures(elastic).reconfigurations:
        # Behind the commit is the end of the first step, which rank 0 may reach a moment earlier.
        crossing = attempt.source_last_step_ended_s, attempt.committed_s
        assert not any(begin < crossing[1] and crossing[0] < end for begin, end in spans)


@pytest.mark.long
def test_what_a_stop_left_out_is_made_up_for_and_nothing_is_done_twice(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS, eval={"every_steps": 1, "steps": 1}))
    watch(run, lambda status: status.step >= 3, 120.0)
    boundary = stopped(run).index.scalars.step
    before = evaluations(read_run(run.path))
    assert [*before] == [*range(1, boundary)]
    go_on(run, pp=2)
    watch(run, lambda status: status.evaluated >= boundary + 2, 120.0)
    records = stop_and_read(run)
    assert [*evaluations(records)] == [*range(1, len(records.steps))]
    assert records.evaluations[boundary - 1].step == boundary
    assert records.evaluations[boundary - 1].started_s < records.steps[boundary].started_s
