"""Handoffs of a live coordinator: they complete, or cost only the attempt, or the run."""

from __future__ import annotations

import contextlib
import math
import threading
import time

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.coordinator.connections import InboxEvent
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.channel import ChannelClosed
from liver_hpc.run.outcome import Outcome
from tests.fakes import Fault
from tests.unit.coordinator.live import LIMIT_S, Start, held_in_prepare, let_go

DP2, TP2, TP2_DP2 = Layout(1, 1, 2), Layout(2, 1, 1), Layout(2, 1, 2)
pytestmark = pytest.mark.timeout(60)


def test_grow_shrink_replace_and_relayout(make: Start) -> None:
    run = make()
    run.cluster.train(3)

    assert run.resize("tp=2,dp=2").text == "started: resize to tp2 pp1 dp2 (operator)"
    grown = run.record(0)
    assert (grown.outcome, grown.detail, grown.digest_equal) == ("completed", "", True)
    assert (grown.source, grown.target) == ("tp1 pp1 dp2", "tp2 pp1 dp2")
    assert sorted(grown.target_workers.split(",")) == ["0", "1", "2", "3"]
    assert run.cluster.world().layout == TP2_DP2

    run.resize("tp=2")
    shrunk = run.record(1)
    assert shrunk.detail == ""
    stayed = run.cluster.world()
    assert stayed.layout == TP2
    gone = {0, 1, 2, 3} - set(stayed.workers)
    assert all(run.cluster.workers[worker].script.dead for worker in gone)
    assert not any(run.cluster.got(worker, m.Exit) for worker in stayed.workers)

    leaver = stayed.workers[1]
    run.ask(m.ReplaceRequest(replace=leaver))
    assert run.record(2).detail == ""
    assert run.cluster.world() == RankMap(TP2, (stayed.workers[0], 4))

    run.resize("pp=2")
    assert run.record(3).detail == ""
    assert run.cluster.world().layout == Layout(1, 2, 1)
    assert len(run.cluster.launched) == 3
    assert [record.generation for record in run.metrics.reconfigurations] == [1, 2, 3, 4]
    status = run.status()
    assert (status["handoffs_done"], status["handoffs_aborted"]) == (4, 0)


def test_the_record_of_a_handoff(make: Start) -> None:
    run = make()
    run.cluster.train(3)
    run.resize("tp=2,dp=2")
    record = run.record(0)
    # Workers 0 and 1 stopped at 100 and 101, and started at 101.5 and 102.5.
    assert record.pause_s == 1.5
    assert record.source_last_step_ended_s == 101.0
    assert record.transfer_ended_s == 104.0
    assert record.first_step_ended_s == 105.5
    assert (record.bytes_moved, record.bytes_local) == (40, 20)
    assert record.step == 3
    assert record.notice == "resize to tp2 pp1 dp2 (operator)"
    assert (record.stayers_file_descriptors, record.stayers_resident_bytes) == (21, 1001)
    order = [
        record.notice_s,
        record.boot_ended_s,
        record.prepare_started_s,
        record.prepare_ended_s,
        record.armed_s,
        record.committed_s,
        record.released_s,
    ]
    assert order == sorted(order)
    assert not any(map(math.isnan, order))


def test_the_record_of_an_aborted_attempt_has_no_times_that_it_never_reached(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.FAIL)
    run.cluster.train(3)
    run.resize("tp=2,dp=2")
    record = run.record(0)
    assert (record.outcome, record.detail) == ("aborted", "PREPARE: worker 2: told to")
    assert not record.digest_equal
    assert record.step == 3
    assert not math.isnan(record.prepare_started_s)
    assert math.isnan(record.armed_s)
    assert math.isnan(record.pause_s)
    assert math.isnan(record.released_s)


def test_steps_beside_a_handoff_are_marked(make: Start) -> None:
    run = make()
    run.cluster.train(2)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    member = run.cluster.workers[0].script
    now_s = SystemClock().now_s()
    # Scripted steps lie in the past: one that ends now, and one that began before the notice.
    done = m.StepDone(
        worker=0,
        generation=0,
        step=member.step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=64,
        started_s=now_s,
        ended_s=now_s + 1.0,
    )
    run.cluster.workers[0].channel.send(done)
    run.until(lambda: len(run.metrics.steps) == 3, "three steps")
    assert [s.phase for s in run.metrics.steps] == ["first", "", "prepare"]


JOINER_FAULTS = [
    (Phase.BOOT, Fault.DIE),
    *((phase, Fault.DIE) for phase in (Phase.PREPARE, Phase.ARMED, Phase.TRANSFER)),
    *((phase, Fault.FAIL) for phase in (Phase.PREPARE, Phase.ARMED, Phase.TRANSFER)),
    *((Phase.TRANSFER, fault) for fault in (Fault.VOTE_NO, Fault.WRONG_DIGEST)),
]


@pytest.mark.parametrize(("phase", "fault"), JOINER_FAULTS)
def test_a_failing_joiner_costs_only_the_attempt(make: Start, phase: Phase, fault: Fault) -> None:
    run = make()
    run.cluster.faults.fail_at(3, phase, fault)
    run.resize("tp=2,dp=2")
    aborted = run.record(0)
    assert aborted.outcome == "aborted"
    # A joiner may fail before or after the first source worker is heard from at the boundary.
    around = (Phase.ARMED, Phase.TRANSFER)
    phases = around if phase in around else (phase,)
    assert aborted.detail.split(": ")[0] in phases
    if fault is Fault.WRONG_DIGEST:
        assert "digests differ" in aborted.detail

    stays = phase is not Phase.BOOT and fault is not Fault.WRONG_DIGEST
    run.until(lambda: run.status()["spares"] == [2] * stays, "who is kept")
    assert run.resize("tp=2,dp=2").ok
    assert run.record(1).detail == ""
    assert run.record(1).spares == stays
    world = run.cluster.world()
    assert set(world.workers) == ({0, 1, 2, 4} if stays else {0, 1, 4, 5})
    assert run.cluster.workers[2].script.dead != stays
    assert run.status()["spares"] == []
    rebuilt = phase in around
    assert run.metrics.reconfigurations[1].source_generation == (2 if rebuilt else 0)
    assert run.metrics.reconfigurations[1].generation == (3 if rebuilt else 2)
    for worker in run.cluster.workers:
        aborts = {message.generation for message in run.cluster.got(worker, m.Abort)}
        commits = {message.generation for message in run.cluster.got(worker, m.Verdict)}
        assert not aborts & commits


class Ahead(SystemClock):
    def now_s(self) -> float:
        return super().now_s() + 10_000.0


def test_no_deadline_passes_while_the_coordinator_stands_still(make: Start) -> None:
    """Also not before it has heard what was said meanwhile, however long it takes to read that."""
    run = held_in_prepare(make)
    run.coordinator._clock = Ahead()
    run.until(lambda: "stood_still" in str(run.metrics.entries), "it to wake")
    run.status()
    run.status()  # some turns later
    let_go(run)
    run.cluster.train(2)
    assert run.record(0).outcome == "completed"


@pytest.mark.parametrize("where", ["_check_epoch", "_dispatch"])
def test_no_deadline_passes_while_a_file_system_does_not_answer(make: Start, where: str) -> None:
    run = held_in_prepare(make)
    clock, do = run.coordinator._clock, getattr(run.coordinator, where)
    assert isinstance(clock, SystemClock)

    def do_slowly(*told: object) -> None:
        setattr(run.coordinator, where, do)
        do(*told)
        clock._offset_s += 10_000.0

    setattr(run.coordinator, where, do_slowly)
    run.status()
    run.until(lambda: "stood_still" in str(run.metrics.entries), "it to wake")
    run.status()
    run.status()  # some turns later
    let_go(run)
    run.cluster.train(2)
    assert run.record(0).outcome == "completed"


def test_a_worker_lost_between_handoffs_fails_the_run(make: Start) -> None:
    run = make()
    run.cluster.workers[1].channel.close()
    assert run.outcome().reason.startswith("worker 1 lost: ")


def test_a_worker_that_reports_the_end_of_its_world_fails_the_run(make: Start) -> None:
    run = held_in_prepare(make)
    run.cluster.workers[1].channel.send(m.Failed(worker=1, generation=0, reason="out of memory"))
    assert run.outcome().reason == "worker 1: out of memory"
    record = run.record(0)
    assert (record.outcome, record.detail) == ("failed", "worker 1: out of memory")


def test_a_silent_worker_is_lost(make: Start) -> None:
    run = make(deadlines={"heartbeat_s": 1.0})
    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(ChannelClosed):
            while not ended.wait(0.05):
                run.cluster.workers[0].channel.send(m.Heartbeat(worker=0, step=0))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        outcome = run.outcome()
    finally:
        ended.set()
        beating.join(LIMIT_S)
    assert outcome.reason == "worker 1 lost: silent for 1 s"


def test_a_silent_joiner_costs_only_the_attempt(make: Start) -> None:
    run = make(deadlines={"prepare_s": 1.0, "exit_s": 0.2})
    run.cluster.faults.fail_at(3, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    assert "PREPARE: waited 1 s for Prepared of workers 3" in run.record(0).detail
    assert run.resize("tp=2,dp=2").ok
    assert run.record(1).detail == ""


def test_an_agent_that_is_long_about_ending_a_boot_keeps_the_workers_that_train(
    make: Start,
) -> None:
    """And nothing is expected of it while the coordinator stands still."""
    run = make(deadlines={"boot_s": 0.7, "meet_s": 0.3, "exit_s": 0.1})
    run.cluster.faults.fail_at(3, Phase.BOOT, Fault.SILENT)
    agent, inbox, clock = run.cluster.agents["a0"], run.coordinator._inbox, run.coordinator._clock
    assert isinstance(clock, SystemClock)
    obey, get, told = agent._obey, inbox.get, threading.Event()

    def stand_still(timeout_s: float) -> InboxEvent | None:
        if told.is_set():
            clock._offset_s += 100.0
            inbox.get = get  # type: ignore[method-assign]
        return get(timeout_s)

    def take_long(order: m.AnyMessage) -> None:
        if isinstance(order, m.EndWorkers) and order.at_once:
            told.set()
            time.sleep(0.5)
        if not isinstance(order, m.EndWorkers) or order.at_once:
            obey(order)

    inbox.get = stand_still  # type: ignore[method-assign]
    agent._obey = take_long  # type: ignore[method-assign]
    run.resize("tp=2,dp=2")
    run.until(lambda: told.is_set() and not run.coordinator._agents._killed, "the boot to end")
    assert inbox.get is not stand_still
    assert run.cluster.launcher.alive("a0")
    assert run.resize("tp=2,dp=2").ok
    assert run.record(1).detail == ""


def test_an_agent_that_dies_in_boot_costs_only_the_attempt(make: Start) -> None:
    run = make()
    run.cluster.fallen_agents["a1"] = 3
    run.resize("tp=2,dp=2")
    wanted = (
        "BOOT: agent a1 ended with exit code 3 before its workers were ready; see logs/*a1*.log"
    )
    assert run.record(0).detail == wanted
    run.resize("tp=2,dp=2")
    assert run.record(1).detail == ""


def test_a_broken_rendezvous_costs_only_the_attempt(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(3, Phase.BOOT, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.until(lambda: 2 in run.cluster.workers, "the other joiner")
    run.cluster.rendezvous.break_down("test")
    assert run.record(0).detail == "BOOT: the rendezvous is broken: test"
    assert run.status()["state"] == "training"


def test_a_late_message_of_an_aborted_attempt_is_ignored(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.FAIL)
    run.resize("tp=2,dp=2")
    run.record(0)
    run.cluster.workers[0].say(
        [
            m.Aborted(worker=0, generation=1),
            m.Failed(worker=0, generation=1, reason="late"),
            m.Prepared(worker=0, generation=1),
        ]
    )
    run.resize("tp=2")
    assert run.record(1).detail == ""


def test_the_last_step_during_prepare_ends_the_run(make: Start) -> None:
    run = make(train={"steps": 4, "global_batch": 8}, checkpoint={"every_steps": None})
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    run.cluster.train(4, last=True)
    assert run.outcome() == Outcome("finished", "all 4 steps are done", 4)
    record = run.record(0)
    assert (record.outcome, record.detail) == ("aborted", "PREPARE: the run reached its end")
    assert not run.cluster.got(0, m.Resume)
