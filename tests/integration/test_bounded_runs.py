"""Handoffs in bounded memory: no worker holds two worlds, and the way back is on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.report.store import RunRecords
from tests.integration.elastic import elastic_run, losses
from tests.integration.runs import finish, run_config, start, worst_difference

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

QUIET_STEPS = 200
BOUNDED = {"memory": "bounded"}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """The same training without any event, longer than any other run here."""
    return finish(start(run_config(tmp_path_factory.mktemp("quiet"), QUIET_STEPS)))


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


def test_a_joiner_that_is_killed_leads_back_to_the_checkpoint_of_the_boundary(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's memory has been given back by then: the run begins again from that step, and
    no step is lost or done twice."""
    monkeypatch.setenv("LIVER_TEST_FAULT", "2:TRANSFER")
    config = run_config(
        tmp_path,
        150,
        recipe="tests.integration.faulty:FaultyGPT",
        notices=[{"at_step": 3, "layout": {"tp": 2, "dp": 2}}],
        handoff=BOUNDED,
    )
    records = finish(start(config))
    (failed,) = records.reconfigurations
    assert failed.outcome == "failed"
    assert "joiner 2 lost" in failed.detail
    assert len(records.steps) == 150
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
