"""Runs that operators steer, that are killed, and that change their shape often."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cli.client import request, stop
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.report.store import read_run
from tests.integration.drifting import AT_STEP
from tests.integration.elastic import elastic_run, losses
from tests.integration.leftovers import no_abandoned_files
from tests.integration.runs import (
    ENDLESS,
    finish,
    kill_host,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_for_end,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]


@pytest.mark.long
def test_dropout_follows_the_samples_through_a_replacement_and_changes_of_pp_and_dp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal while the layout stays the same, within 1e-4 after; with dropout 0.1 throughout."""
    dropout = {"dropout": 0.1}
    notices = [
        {"at_step": 2, "replace": 0},
        {"at_step": 3, "layout": {"pp": 2, "dp": 2}},
        {"at_step": 4, "layout": {"dp": 2}},
    ]
    elastic = elastic_run(tmp_path, notices, model=dropout)
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    config = run_config(tmp_path, len(elastic.steps), model=dropout)
    fixed = finish(start(config))
    assert [r.outcome for r in elastic.reconfigurations] == ["completed"] * 3
    same_layout = elastic.reconfigurations[1].step
    assert losses(elastic)[:same_layout] == losses(fixed)[:same_layout]
    assert worst_difference(losses(elastic), losses(fixed)) <= 1e-4


@pytest.mark.long
def test_a_copy_that_drifts_is_found_beside_a_step_and_ends_the_run(tmp_path: Path) -> None:
    recipe = "tests.integration.drifting:DriftingGPT"
    config = run_config(
        tmp_path, ENDLESS, recipe=recipe, train={"verify_every_steps": 2}, layouts={2: [{"tp": 2}]}
    )
    run = start(config)
    outcome = wait_for_end(run, 120.0)
    assert outcome.state == "failed"
    assert outcome.step > AT_STEP
    assert "copies of the state differ after step 10: parameter (replicated" in outcome.reason
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


@pytest.mark.long
def test_operators_resize_replace_and_stop_a_run(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS))
    watch(run, lambda status: status.step >= 2, 60.0)
    assert "started" in request(run, ResizeRequest(workers=4)).text
    assert "queued" in request(run, ReplaceRequest(replace=0)).text
    watch(run, lambda status: status.handoffs_done == 2, 90.0)
    watch(run, lambda status: len(status.workers) == 4 and 0 not in status.workers, 10.0)
    outcome = stop(run)
    assert outcome.state == "stopped"
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")
    networks = read_run(run.path).networks
    assert [record.generation for record in networks] == [0, 1, 2]
    assert {record.transport for record in networks} == {"gloo tcp"}
    assert all("lo/127.0.0.1" in record.detail for record in networks)


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.long), True])
def test_nothing_is_left_where_no_coordinator_comes_back(tmp_path: Path, busy: bool) -> None:
    """Who would start another one is killed, too; also in the middle of a handoff, with joiners
    booting."""
    with no_abandoned_files():
        run = start(run_config(tmp_path, ENDLESS, deadlines={"coordinator_s": 2.0}))
        watch(run, lambda status: status.step >= 2, 60.0)
        if busy:
            request(run, ResizeRequest(workers=4))
            watch(run, lambda status: status.handoff is not None, 10.0)
        kill_host(run)
        wait_until(lambda: not processes_of(run), 20.0, f"processes {processes_of(run)}")


@pytest.mark.long
def test_twenty_handoffs_in_a_row_leak_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    """The stayers of the 20th handoff hold what they held after the 5th."""
    cycle = [{"pp": 2, "dp": 2}, {"dp": 4}, {"tp": 2, "dp": 2}]
    notices = [{"at_step": 2 + i, "layout": cycle[i % 3]} for i in range(20)]
    config = run_config(tmp_path, ENDLESS, initial=4, notices=notices)
    run = start(config)
    watch(run, lambda status: status.handoffs_done == 20, 200.0)
    rows = stop_and_read(run).reconfigurations
    assert [row.outcome for row in rows] == ["completed"] * 20
    descriptors = [row.stayers_file_descriptors for row in rows]
    resident = [row.stayers_resident_bytes for row in rows]
    assert descriptors[19] <= descriptors[4], descriptors
    assert resident[19] <= resident[4] * 1.05, resident
