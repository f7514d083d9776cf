"""Handoffs in bounded memory: no worker holds two worlds, and the way back is on the disk."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli.submission import checked_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.budget import Budget
from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import RunRecords
from tests.integration.elastic import elastic_run, losses
from tests.integration.runs import finish, run_config, start, worst_difference

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

STEPS = 40
BOUNDED = {"memory": "bounded"}


@pytest.mark.usefixtures("unhurried_steps")
def test_a_run_trains_on_as_if_both_worlds_had_been_held(tmp_path: Path, quiet: RunRecords) -> None:
    notices = [
        {"at_step": 4, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 6, "layout": {"pp": 2}},
        {"at_step": 8, "replace": 1},
    ]
    elastic = elastic_run(tmp_path, notices, handoff=BOUNDED)
    outcomes = [(r.target, r.outcome, r.digest_equal) for r in elastic.reconfigurations]
    assert outcomes == [
        ("tp2 pp1 dp2", "completed", True),
        ("tp1 pp2 dp1", "completed", True),
        ("tp1 pp2 dp1", "completed", True),
    ]
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-4


def test_it_is_chosen_where_both_worlds_do_not_fit(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest change of the run file fits in bounded memory, and this one with nothing left."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.05")
    notices = [{"at_step": 4, "layout": {"tp": 2}}]
    config, recipe = checked_run(run_config(tmp_path, 100))
    budget = Budget(config, recipe.spec, recipe.rehearsal_bytes)
    most, *_ = budget.fullest_bounded_change(config.layouts_listed)
    elastic = elastic_run(tmp_path, notices, policy={"memory_bytes": most})
    (handoff,) = run_figures(elastic).reconfigurations
    assert handoff.outcome == "completed"
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-4
    (log,) = {path.resolve() for path in tmp_path.glob("runs/*/logs/coordinator.log")}
    assert re.search(
        r"generation 1 in bounded memory, for about \d+\.\d s of training, \d+\.\d s of them for a "
        rf"checkpoint: both worlds would take \d+ bytes of a worker, policy.memory_bytes is {most}",
        log.read_text(),
    )
    stopped_s, saved_s = handoff.source_last_step_ended_s, handoff.checkpointed_s
    assert stopped_s < saved_s < handoff.transfer_ended_s


def test_a_full_disk_leads_back_to_the_source(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is whole: nothing has been given back, and no world is built again."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.05")
    monkeypatch.setenv("LIVER_TEST_FILE_BYTES", str(1 << 18))
    notices = [{"at_step": 4, "layout": {"tp": 2}}]
    recipe = "tests.integration.dies_writing:DiesWriting"
    elastic = elastic_run(tmp_path, notices, handoff=BOUNDED, recipe=recipe)
    (handoff,) = elastic.reconfigurations
    assert handoff.outcome == "aborted"
    assert "the way back cannot be written: checkpoint of step" in handoff.detail
    assert {step.generation for step in elastic.steps} == {0}
    assert worst_difference(losses(elastic), losses(quiet)) <= 1e-4


@pytest.mark.usefixtures("unhurried_steps")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        # Whoever waits for one that dies may be heard before its end is.
        ("2:TRANSFER", "joiner 2 lost|voted no: TransferError: .*worker 2"),
        ("0:TRANSFER", "worker 0 lost|voted no: TransferError: .*worker 0"),
        ("0:FORWARD", "worker 0 lost|voted no: (Runtime|Transfer)Error"),
        ("0:VERDICT", "worker [0-3] (lost|failed) after the commit"),
        ("2:FLIP", "hold something else than was sent to them, by digest"),
        ("2:STALL", "voted no: DeadlineError: waited"),
    ],
)
def test_what_fails_once_memory_is_given_back_leads_to_the_checkpoint_of_the_boundary(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    """The run begins again from that very step: none is lost, and none is done twice."""
    monkeypatch.setenv("LIVER_TEST_FAULT", fault)
    records = finish(start(_faulty(tmp_path)))
    (failed,) = records.reconfigurations
    assert failed.outcome == "failed"
    assert re.search(said, failed.detail)
    assert failed.checkpointed_s > failed.source_last_step_ended_s
    assert len(records.steps) == STEPS
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4


@pytest.mark.usefixtures("unhurried_steps")
@pytest.mark.parametrize("fault", ["0:PREPARE", "1:SAVE"])
def test_a_source_worker_that_dies_before_leads_to_the_checkpoint_before(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("LIVER_TEST_FAULT", fault)
    records = finish(start(_faulty(tmp_path, checkpoint={"every_steps": 4})))
    failed, *again = records.reconfigurations
    assert failed.outcome == "failed"
    assert math.isnan(failed.checkpointed_s)
    assert {each.outcome for each in again} <= {"completed"}  # where its notice comes again
    assert len(records.steps) > STEPS
    last = {record.step: (record.loss, record.grad_norm) for record in records.steps}
    assert [*last] == [*range(STEPS)]
    assert worst_difference([*last.values()], losses(quiet)) <= 1e-4


@pytest.mark.usefixtures("unhurried_steps")
def test_a_joiner_that_dies_before_costs_only_the_attempt(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIVER_TEST_FAULT", "2:PREPARE")
    records = finish(start(_faulty(tmp_path)))
    assert [each.outcome for each in records.reconfigurations] == ["aborted"]
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4


def _faulty(tmp_path: Path, **sections: Any) -> RunConfig:
    """A run that grows from two workers to four, of which one fails."""
    return run_config(
        tmp_path,
        STEPS,
        recipe="tests.integration.faulty:FaultyGPT",
        notices=[{"at_step": 5, "layout": {"tp": 2, "dp": 2}}],
        deadlines={"transfer_s": 5.0},
        handoff=BOUNDED,
        **sections,
    )
