"""An agent that stays takes one launch after the other, and one's end does not touch the others."""

from __future__ import annotations

import os
import signal

import pytest

from liver_hpc.layout.coordinates import Layout
from liver_hpc.node.launch import EXIT_BOOT
from liver_hpc.protocol.messages import (
    AgentHello,
    EndWorker,
    EndWorkers,
    Exit,
    LaunchEnded,
    StartWorkers,
    Warned,
    WorkerEnded,
)
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from tests.integration.agents import Run, request, wait_for

pytestmark = pytest.mark.timeout(60)


def staying(run: Run, then: str = "works", options: tuple[str, ...] = ()) -> None:
    """An agent that stays, with one worker at work, in slot 0."""
    run.open_rendezvous()
    run.launcher(then, options=options, stay=True).launch(request(workers=1))
    run.notes((0,))
    run.coordinator.wait_heard(AgentHello)


def order(run: Run, launch: str, *slots: int) -> None:
    run.coordinator.channels["a0"].send(StartWorkers(launch=launch, slots=slots, layout="dp2"))


def pid_in(run: Run, slot: int) -> int:
    (note,) = run.notes((slot,))
    pid = note["pid"]
    assert isinstance(pid, int)
    return pid


def end(run: Run) -> int:
    run.coordinator.channels["a0"].send(Exit(reason="over"))
    return run.wait_ended(run.launchers[0])


def test_a_further_launch_meets_and_works_and_both_end_by_themselves(run: Run) -> None:
    staying(run)
    order(run, "a1", 2, 3)
    assert [note["told"]["worker"] for note in run.notes((2, 3))] == [5, 6]  # type: ignore[index]
    assert len(run.coordinator.said(AgentHello)) == 1
    os.kill(pid_in(run, 0), signal.SIGINT)
    (first,) = run.coordinator.wait_heard(LaunchEnded)
    assert first == LaunchEnded(agent="a0", launch="a0", exit_code=128 + signal.SIGINT)
    assert {pid_in(run, 2), pid_in(run, 3)} <= set(run.alive())
    for slot in (2, 3):
        os.kill(pid_in(run, slot), signal.SIGINT)
    run.coordinator.wait_heard(LaunchEnded, 2)
    assert run.log("worker-a1-0").startswith("at work\n")
    assert run.alive() == run.agents()
    assert run.launchers[0].alive("a0")
    assert end(run) == 0
    assert run.alive() == []


def test_a_launch_that_fails_costs_no_other_one(run: Run) -> None:
    staying(run, "slot 1 fails")
    order(run, "a1", 1, 2)
    (ended,) = run.coordinator.wait_heard(LaunchEnded)
    assert (ended.launch, ended.exit_code) == ("a1", EXIT_BOOT)
    assert "worker 0 of agent a1 ended in boot (exit code 3)" in ended.error
    assert str(run.directory / "logs" / "worker-a1-0.log") in ended.error
    wait_for(lambda: len(run.alive()) == 2, "the failed launch to end")
    order(run, "a2", 2)
    assert pid_in(run, 2) in run.alive()
    assert end(run) == 0


def test_a_launch_that_boots_too_slowly_says_so(run: Run) -> None:
    run.set_deadline("boot_s", 3.0)
    staying(run, "slot 1 hangs")
    order(run, "a1", 1)
    (ended,) = run.coordinator.wait_heard(LaunchEnded)
    assert "waited 3 s for workers [0] of agent a1 to boot" in ended.error
    assert pid_in(run, 0) in run.alive()


@pytest.mark.parametrize("at_once", [False, True])
def test_one_launch_is_ended_by_order_and_killed_if_it_does_not_listen(
    run: Run, at_once: bool
) -> None:
    staying(run, "deaf", ("--warnings",))
    order(run, "a1", 1)
    kept = pid_in(run, 0)
    run.notes((1,))
    ends = EndWorkers(launch="a1", reason="of no more use", at_once=at_once)
    run.coordinator.channels["a0"].send(ends)
    (ended,) = run.coordinator.wait_heard(LaunchEnded)
    assert (ended.launch, ended.exit_code) == ("a1", 0)
    said = "worker 5 has not ended 1 s after SIGHUP"
    assert (said in run.log("agent-a0")) == (not at_once)
    assert kept in run.alive()
    assert len(run.alive()) == 2


def test_a_worker_that_stands_still_is_killed_by_order_and_its_neighbour_is_not(run: Run) -> None:
    staying(run)
    order(run, "a1", 1, 2)
    still, neighbour = pid_in(run, 1), pid_in(run, 2)
    os.kill(still, signal.SIGSTOP)
    (told,) = (note["told"] for note in run.notes((1,)))
    ends = EndWorker(worker=told["worker"], reason="silent for 4 s")  # type: ignore[index]
    run.coordinator.channels["a0"].send(ends)
    (ended,) = run.coordinator.wait_heard(WorkerEnded)
    assert (ended.worker, ended.how) == (ends.worker, "signal 9; see logs/worker-a1-0.log")
    assert neighbour in run.alive()
    assert still not in run.alive()


def test_a_workers_end_and_a_warning_are_told_by_the_one_agent(run: Run) -> None:
    staying(run, "works", ("--warnings",))
    order(run, "a1", 1)
    os.kill(pid_in(run, 1), signal.SIGKILL)
    (ended,) = run.coordinator.wait_heard(WorkerEnded)
    assert (ended.agent, ended.how) == ("a0", "signal 9; see logs/worker-a1-0.log")
    (agent,) = run.agents()
    os.kill(agent, signal.SIGTERM)
    (warned,) = run.coordinator.wait_heard(Warned)
    assert (warned.agent, warned.signal) == ("a0", "TERM")


def test_an_agent_without_work_ends_when_its_coordinator_is_gone(run: Run) -> None:
    staying(run)
    os.kill(pid_in(run, 0), signal.SIGINT)
    run.coordinator.wait_heard(LaunchEnded)
    run.coordinator.close()
    run.wait_ended(run.launchers[0])
    assert run.alive() == []


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_with_the_agent_all_its_launches_end(run: Run, name: str) -> None:
    staying(run)
    order(run, "a1", 1, 2)
    run.notes((1, 2))
    (agent,) = run.agents()
    os.kill(agent, signal.Signals[f"SIG{name}"])
    wait_for(lambda: run.alive() == [], "the tree to end", 5.0)


def test_an_agent_without_slots_meets_for_itself_and_waits_for_launches(run: Run) -> None:
    run.open_rendezvous()
    bare = LaunchAgent("a0", Seat("", ()), Layout(1, 1, 1))
    run.launcher("works", stay=True).launch(bare)
    run.coordinator.wait_heard(AgentHello)
    (ended,) = run.coordinator.wait_heard(LaunchEnded)
    assert (ended.launch, ended.exit_code) == ("a0", 0)
    assert run.alive() == run.agents()
    order(run, "a1", 1)
    assert pid_in(run, 1) in run.alive()
    assert end(run) == 0
