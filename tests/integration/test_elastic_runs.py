"""Runs whose shape changes live train as one whose shape does not."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import RunRecords
from tests.integration.diverging import FIRST_STEP
from tests.integration.elastic import elastic_run, losses
from tests.integration.runs import finish, run_config, start, watch, worst_difference

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

FIVE_HANDOFFS = [
    {"at_step": 4, "layout": {"tp": 2, "dp": 2}},
    {"at_step": 5, "layout": {"pp": 2, "dp": 2}},
    {"at_step": 6, "replace": 1},
    {"at_step": 7, "layout": {"tp": 2}},
    {"at_step": 8, "layout": {"tp": 2, "dp": 2}},
]


def test_loss_and_gradient_norm_of_a_run_with_five_handoffs_match_a_fixed_run(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """Relative difference at most 1e-4 at every one of at least 60 steps, in fp32."""
    elastic = elastic_run(tmp_path, FIVE_HANDOFFS, at_least=60)
    outcomes = [(r.target, r.outcome, r.digest_equal) for r in elastic.reconfigurations]
    assert outcomes == [
        ("tp2 pp1 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp2 pp1 dp1", "completed", True),
        ("tp2 pp1 dp2", "completed", True),
    ]
    assert len(elastic.steps) >= 60
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-4
    learning_rates = [record.learning_rate for record in elastic.steps]
    assert learning_rates == [r.learning_rate for r in quiet.steps][: len(learning_rates)]
    for attempt in run_figures(elastic).reconfigurations:
        assert attempt.path is not None
        assert attempt.path.lines.forward_backward_s > 0
    # What is in no lost time is in a step: each begins where the one before has ended.
    within = [pair for pair in pairwise(elastic.steps) if pair[0].generation == pair[1].generation]
    assert all(after.started_s == before.ended_s for before, after in within)


def test_a_run_whose_workers_are_replaced_is_bit_equal_to_one_whose_are_not(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """Same layout, other processes: every loss and gradient norm equal to the last bit."""
    moved = elastic_run(tmp_path, [{"at_step": 2, "replace": 0}, {"at_step": 3, "replace": 1}])
    assert [r.target_workers for r in moved.reconfigurations] == ["2,1", "2,3"]
    assert losses(moved) == losses(quiet)[: len(moved.steps)]


@pytest.mark.parametrize(
    ("moment", "then"),
    [
        pytest.param("PREPARE", {"dp": 4}, marks=pytest.mark.long),
        pytest.param("TRANSFER", {"pp": 2}, marks=pytest.mark.long),
        pytest.param("FORWARD", {"pp": 2}, marks=pytest.mark.long),
    ],
)
def test_a_joiner_that_is_killed_costs_the_attempt_and_the_next_resize_succeeds(
    moment: str,
    then: dict[str, int],
    tmp_path: Path,
    quiet: RunRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 2 dies by SIGKILL; the losses stay those of a run in which nothing happened.

    The next resize waits in the queue. One that needs no joiners starts at the very moment at
    which the source workers go back, or rebuild.
    """
    monkeypatch.setenv("LIVER_TEST_FAULT", f"2:{moment}")
    notices = [
        {"at_step": 2, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 3, "layout": then},
    ]
    records = elastic_run(tmp_path, notices, recipe="tests.integration.faulty:FaultyGPT")
    first, second = records.reconfigurations
    assert first.outcome == "aborted"
    assert f"{'PREPARE' if moment == 'PREPARE' else 'TRANSFER'}: " in first.detail
    assert (second.outcome, second.digest_equal) == ("completed", True)
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4


@pytest.mark.long
def test_a_run_whose_loss_is_no_number_goes_on_to_its_last_step(tmp_path: Path) -> None:
    """What it means is training's to say; a handoff in its midst is as any other."""
    steps, notices = 40, [{"at_step": FIRST_STEP + 1, "layout": {"tp": 2}}]
    recipe = "tests.integration.diverging:DivergingGPT"
    run = start(run_config(tmp_path, steps, recipe=recipe, notices=notices))
    watch(run, lambda status: status.loss is not None and math.isnan(status.loss), 150.0)
    records = finish(run)
    finite = [record.is_finite for record in records.steps]
    assert finite == [number < FIRST_STEP for number in range(steps)]
    assert all(math.isnan(record.loss) for record in records.steps[FIRST_STEP:])
    assert [(r.outcome, r.digest_equal) for r in records.reconfigurations] == [("completed", True)]
