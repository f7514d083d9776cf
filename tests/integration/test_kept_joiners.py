"""Joiners outlive a handoff that is called off, and have a seat in the next one without a boot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from liver_hpc.cli.client import request
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.report.store import RunRecords
from liver_hpc.run.entries import JOURNAL_FILE, read_entries
from tests.integration.elastic import losses
from tests.integration.nodes import on_nodes, workers_of
from tests.integration.runs import (
    ENDLESS,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("unhurried_steps")]


def called_off(times: int, *spares: int) -> Callable[[StatusSnapshot], bool]:
    """Whether so many handoffs were, and these workers wait for another one."""
    return lambda status: status.handoffs_aborted == times and status.spares == spares


@pytest.mark.long
def test_joiners_of_a_handoff_that_was_called_off_join_by_the_next_one(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source worker calls two handoffs off; the joiners have the same processes in both and hold
    no more than before. One is killed, which costs nothing; the other one has a seat in the end."""
    monkeypatch.setenv("LIVER_TEST_FAULT", "0:REFUSE")
    run = start(run_config(tmp_path, ENDLESS, recipe="tests.integration.faulty:FaultyGPT"))
    watch(run, lambda status: status.step >= 1, 60.0)
    trains = workers_of(run)
    request(run, ResizeRequest(workers=4))
    watch(run, called_off(1, 2, 3), 60.0)
    kept = workers_of(run) - trains
    assert len(kept) == 2
    held = {each.pid: (each.num_fds(), each.num_threads()) for each in kept}

    request(run, ResizeRequest(workers=4))
    watch(run, called_off(2, 2, 3), 30.0)
    assert workers_of(run) - trains == kept
    same = lambda: held == {each.pid: (each.num_fds(), each.num_threads()) for each in kept}  # noqa: E731
    wait_until(same, 10.0, f"descriptors and threads of {held}")

    killed, other = kept
    killed.kill()
    watch(run, lambda status: len(status.spares) == 1, 10.0)
    request(run, ReplaceRequest(replace=1))
    watch(run, lambda status: status.handoffs_done == 1, 30.0)
    assert other in workers_of(run)
    assert len(workers_of(run)) == 2
    records = stop_and_read(run)
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
    first, second, third = records.reconfigurations
    assert (first.spares, second.spares, third.spares) == (0, 2, 1)
    assert (third.outcome, third.digest_equal) == ("completed", True)
    assert third.boot_ended_s - third.notice_s < 0.2
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


def test_a_standby_takes_the_seat_of_a_worker_whose_node_is_taken_away(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """Without boot, and without rehearsal of whichever stage it comes to. Then another standby
    boots, and ends with the run."""
    sections = {"workers": {"standby": 1}, "layouts": {2: [{"pp": 2}]}, "policy": {"settle_s": 0.1}}
    config = run_config(tmp_path, ENDLESS, **sections)
    run, pool, coordinator = on_nodes(config, n1=1, n2=1, n3=2)
    watch(run, lambda status: status.step >= 1 and status.spares == (2,), 60.0)
    logs = [*run.path.glob("logs/worker-*.log")]
    rehearsed = "rehearsed stage 1 of tp1 pp2 dp1"
    wait_until(lambda: any(rehearsed in log.read_text() for log in logs), 20.0, rehearsed)
    before = workers_of(run)
    assert len(before) == 3

    pool.warn("n2", "preempted", window_s=30.0)
    watch(run, lambda status: 2 in status.workers and status.handoff is None, 30.0)
    wait_until(lambda: "n2" in pool.given_back, 10.0, "the node to be left")
    assert len(before & workers_of(run)) == 2, "who stays, and the standby in the leaver's place"
    watch(run, lambda status: status.spares == (3,), 30.0)
    (prepared,) = (
        each
        for entry in read_entries(run.path / JOURNAL_FILE)
        for each in entry.event.get("messages", (entry.event,))
        if (each.get("type"), each.get("worker")) == ("prepared", 2)
    )
    assert prepared["timings_s"]["warm_up"] < 0.02

    records = stop_and_read(run)
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
    (record,) = records.reconfigurations
    assert (record.outcome, record.digest_equal, record.spares) == ("completed", True, 1)
    assert record.boot_ended_s - record.notice_s < 0.2
    assert [each.outcome for each in records.notices if each.node == "n2"] == ["in time"]
    coordinator.join(20.0)
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")
