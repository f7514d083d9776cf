"""The coordinator against scripted workers over the real control channel."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordination.loop import Coordinator
from liver_hpc.coordination.run_files import Outcome
from liver_hpc.coordination.services import Services
from liver_hpc.coordinator import run_coordinator
from liver_hpc.errors import MeetingError
from liver_hpc.layout.coordinates import Layout, Roster
from liver_hpc.metrics.records import ReconfigurationRecord
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.rendezvous.meeting import Identity
from tests.fakes import Fault, MemoryMetrics, tiny_recipe, tiny_run
from tests.scripted_cluster import ScriptedCluster

SECRET = b"s" * 32
LIMIT_S = 10.0
DP2, TP2, TP2_DP2 = Layout(1, 1, 2), Layout(2, 1, 1), Layout(2, 1, 2)

pytestmark = pytest.mark.timeout(60)


class LiveRun:
    """A coordinator in a thread, its scripted cluster, and an operator."""

    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.directory = directory
        self.cluster = ScriptedCluster(SECRET)
        self.metrics = MemoryMetrics()
        services = Services(
            clock=SystemClock(),
            recipe=tiny_recipe(config),
            launcher=self.cluster.launcher,
            front_desk=self.cluster.desk,
            metrics=self.metrics,
        )
        self.coordinator = Coordinator(config, directory, SECRET, services)
        self.result: Outcome | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._operator: Channel | None = None

    def start(self) -> None:
        """Returns once training has begun."""
        self.start_only()
        self.until(lambda: self.status()["state"] == "training", "training to begin")

    def start_only(self) -> None:
        self._thread.start()
        where = self.directory / "coordinator.json"
        self.until(lambda: where.exists() or not self._thread.is_alive(), "the control server")

    def _run(self) -> None:
        self.result = self.coordinator.run()

    def until(self, condition: Callable[[], object], waits_for: str) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, waits_for)
        poll_until(lambda: bool(condition()), deadline, 0.002)

    def ask(self, request: m.FromOperator) -> m.Reply:
        if self._operator is None:
            where = json.loads((self.directory / "coordinator.json").read_text())
            address = (where["host"], where["port"])
            self._operator = connect(address, SECRET, LIMIT_S, "the coordinator")
        self._operator.send(request)
        reply = self._operator.receive(LIMIT_S)
        assert isinstance(reply, m.Reply)
        return reply

    def resize(self, layout: str) -> m.Reply:
        return self.ask(m.ResizeRequest(layout=layout))

    def status(self) -> dict[str, Any]:
        return self.ask(m.StatusRequest()).data

    def phase(self) -> str:
        handoff = self.status()["handoff"]
        return handoff["phase"] if handoff else "IDLE"

    def reach(self, phase: Phase) -> None:
        self.until(lambda: self.phase() == phase, f"phase {phase}")

    def record(self, number: int) -> ReconfigurationRecord:
        """The record of the number-th attempt, once it has ended."""
        self.until(lambda: len(self.metrics.reconfigurations) > number, f"attempt {number} to end")
        return self.metrics.reconfigurations[number]

    def outcome(self) -> Outcome:
        """How the run ended; checks that nothing of it is left."""
        self._thread.join(LIMIT_S)
        assert self.result is not None, "the coordinator still runs"
        self.cluster.join(LIMIT_S)
        assert self.metrics.closed
        with pytest.raises(MeetingError):
            self.cluster.desk.meet(Identity(agent="late", host="h", pid=1, workers=1), SECRET)
        return self.result

    def close(self) -> None:
        if self._operator is not None:
            self._operator.close()
        if self._thread.is_alive():
            for played in self.cluster.workers.values():
                played.channel.close()
            self._thread.join(LIMIT_S)
            assert not self._thread.is_alive(), "the coordinator still runs"


Start = Callable[..., LiveRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Start]:
    """Makes a run, by default starts it, and sees to its end."""
    runs: list[LiveRun] = []

    def make(begin: bool = True, **sections: Any) -> LiveRun:
        run = LiveRun(tmp_path, tiny_run(**sections))
        runs.append(run)
        if begin:
            run.start()
        return run

    yield make
    for run in runs:
        run.close()


# ---- start and end


def test_a_run_from_its_first_to_its_last_step(make: Start) -> None:
    run = make(train={"steps": 3, "global_batch": 8})
    begin = m.Begin(generation=0, roster=m.WireRoster(tp=1, pp=1, dp=2, workers=(0, 1)))
    run.until(lambda: run.cluster.got(1, m.Begin), "Begin")
    assert run.cluster.got(0, m.Begin) == run.cluster.got(1, m.Begin) == [begin]
    run.cluster.train(3, last=True)

    assert run.outcome() == Outcome("finished", "all 3 steps are done", 3)
    assert [(s.step, s.phase) for s in run.metrics.steps] == [(0, "first"), (1, ""), (2, "")]
    assert run.cluster.got(0, m.Exit)
    assert run.cluster.got(1, m.Exit)


def test_where_the_coordinator_is_stands_in_a_private_file(make: Start) -> None:
    run = make()
    path = run.directory / "coordinator.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_agents_are_launched_with_the_workers_of_a_node(make: Start) -> None:
    run = make(workers={"initial": 4, "max": 4}, cluster={"workers_per_node": 3})
    assert [(r.agent, r.workers, r.layout) for r in run.cluster.launched] == [
        ("a0", 3, "tp2 pp1 dp2"),
        ("a1", 1, "tp2 pp1 dp2"),
    ]
    assert run.status()["workers"] == [0, 1, 2, 3]


def test_the_status_says_where_the_run_stands(make: Start) -> None:
    run = make()
    run.cluster.train(2)
    run.until(lambda: run.status()["step"] == 2, "two steps")
    status = run.status()
    assert (status["run"], status["state"], status["steps"]) == ("tiny", "training", 60)
    assert (status["generation"], status["layout"]) == (0, "tp1 pp1 dp2")
    assert status["tokens_per_s"] == 128.0
    assert status["handoff"] is None
    assert "training begins" in status["last_event"]


def test_a_stop_ends_the_run_at_a_step_boundary(make: Start) -> None:
    run = make()
    run.cluster.train(5)
    assert run.ask(m.StopRequest()).text == "stopping at the next step boundary"
    assert run.outcome() == Outcome("stopped", "an operator's request", 5)


def test_a_stop_before_training_begins(make: Start) -> None:
    run = make(begin=False)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    assert run.ask(m.StopRequest()).text == "stopped before training began"
    assert run.outcome().state == "stopped"


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.SILENT])
def test_a_first_worker_that_does_not_come_fails_the_run(make: Start, fault: Fault) -> None:
    run = make(begin=False, deadlines={"boot_s": 0.3, "meet_s": 0.2})
    run.cluster.faults.fail_at(1, Phase.BOOT, fault)
    run.start_only()
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert (
        outcome.reason
        == {
            Fault.DIE: "agent a0 ended with exit code 5 before its workers were ready",
            Fault.SILENT: "waited 0.5 s for Hello of workers [1]",
        }[fault]
    )


def test_workers_that_end_too_early_fail_the_run(make: Start) -> None:
    run = make()
    run.cluster.train(3, last=True)
    outcome = run.outcome()
    assert (outcome.state, outcome.reason) == ("failed", "the workers ended after 3 of 60 steps")


def test_workers_that_do_not_stop_fail_the_run_and_are_named(make: Start) -> None:
    run = make(deadlines={"boundary_s": 0.3})
    run.cluster.workers[1].script.mute = True
    run.ask(m.StopRequest())
    assert run.outcome().reason == "waited 0.3 s for Finished of workers [1]"


# ---- handoffs


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
    assert run.cluster.world() == Roster(TP2, (stayed.workers[0], 4))

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
        record.transfer_ended_s,
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


VOTING = (Phase.TRANSFER, Phase.COMMIT)
JOINER_FAULTS = [
    (Phase.BOOT, Fault.DIE),
    *((phase, Fault.DIE) for phase in (Phase.PREPARE, Phase.ARMED, *VOTING)),
    *((phase, Fault.FAIL) for phase in (Phase.PREPARE, Phase.ARMED, *VOTING)),
    *((phase, fault) for phase in VOTING for fault in (Fault.VOTE_NO, Fault.WRONG_DIGEST)),
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

    assert run.resize("tp=2,dp=2").ok
    assert run.record(1).detail == ""
    world = run.cluster.world()
    assert set(world.workers) == {0, 1, 4, 5}
    run.until(lambda: run.cluster.workers[2].script.dead, "the other joiner to leave")
    rebuilt = phase is Phase.COMMIT
    assert run.metrics.reconfigurations[1].source_generation == (2 if rebuilt else 0)
    assert run.metrics.reconfigurations[1].generation == (3 if rebuilt else 2)
    for worker in run.cluster.workers:
        aborts = {message.generation for message in run.cluster.got(worker, m.Abort)}
        commits = {
            message.generation
            for message in run.cluster.got(worker, m.Verdict)
            if message.stage == "commit"
        }
        assert not aborts & commits


def test_a_wrong_digest_of_a_source_worker_aborts(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(0, Phase.COMMIT, Fault.WRONG_DIGEST)
    run.resize("tp=2,dp=2")
    assert "digests differ; exp_avg" in run.record(0).detail
    assert run.status()["state"] == "training"


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.ARMED, Phase.TRANSFER, Phase.COMMIT])
def test_a_lost_source_worker_fails_the_run_and_is_named(make: Start, phase: Phase) -> None:
    run = make()
    run.cluster.faults.fail_at(1, phase)
    run.resize("tp=2,dp=2")
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert "worker 1 lost" in outcome.reason
    assert run.record(0).outcome == "failed"


def test_a_worker_lost_between_handoffs_fails_the_run(make: Start) -> None:
    run = make()
    run.cluster.workers[1].channel.close()
    assert run.outcome().reason.startswith("worker 1 lost: ")


def test_a_worker_that_reports_the_end_of_its_world_fails_the_run(make: Start) -> None:
    run = _held_in_prepare(make)
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


@pytest.mark.parametrize(
    ("phase", "limits", "wanted"),
    [
        (Phase.BOOT, {"boot_s": 0.7, "meet_s": 0.3}, "BOOT: waited 1 s for Hello of 1 of 2"),
        (Phase.PREPARE, {"prepare_s": 1.0}, "PREPARE: waited 1 s for Prepared of workers [3]"),
        (Phase.TRANSFER, {"transfer_s": 1.0}, "TRANSFER: waited 1 s for Vote of workers [3]"),
        (Phase.COMMIT, {"transfer_s": 1.0}, "COMMIT: waited 1 s for Vote of workers [3]"),
    ],
)
def test_a_silent_joiner_costs_only_the_attempt(
    make: Start, phase: Phase, limits: dict[str, float], wanted: str
) -> None:
    run = make(deadlines={**limits, "exit_s": 0.2})
    run.cluster.faults.fail_at(3, phase, Fault.SILENT)
    run.resize("tp=2,dp=2")
    assert wanted in run.record(0).detail
    assert run.resize("tp=2,dp=2").ok
    assert run.record(1).detail == ""


def test_workers_that_do_not_reach_the_boundary_cost_only_the_attempt(make: Start) -> None:
    run = make(deadlines={"boundary_s": 0.3})
    for worker in range(4):
        run.cluster.faults.fail_at(worker, Phase.ARMED, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.ARMED)
    for worker in (0, 1):
        run.cluster.workers[worker].script.mute = False
    assert "ARMED: waited 0.3 s for AtBoundary of workers [0, 1]" in run.record(0).detail


def test_a_target_worker_without_a_first_step_fails_the_run(make: Start) -> None:
    run = make(deadlines={"release_s": 0.3})
    run.cluster.faults.fail_at(2, Phase.RELEASE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert "RELEASE: waited 0.3 s for FirstStep of workers [2]" in outcome.reason


def test_an_agent_that_dies_in_boot_costs_only_the_attempt(make: Start) -> None:
    run = make()
    run.cluster.fallen_agents.add("a1")
    run.resize("tp=2,dp=2")
    wanted = "BOOT: agent a1 ended with exit code 3 before its workers were ready"
    assert run.record(0).detail == wanted
    run.resize("tp=2,dp=2")
    assert run.record(1).detail == ""


def test_a_broken_front_desk_costs_only_the_attempt(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(3, Phase.BOOT, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.until(lambda: 2 in run.cluster.workers, "the other joiner")
    run.cluster.desk.break_down("test")
    assert run.record(0).detail == "BOOT: the front desk is broken: test"
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
    run = make(train={"steps": 4, "global_batch": 8})
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    run.cluster.train(4, last=True)
    assert run.outcome() == Outcome("finished", "all 4 steps are done", 4)
    record = run.record(0)
    assert (record.outcome, record.detail) == ("aborted", "PREPARE: the run reached its end")
    assert not run.cluster.got(0, m.Resume)


# ---- stop during a handoff


@pytest.mark.parametrize(
    "phase", [Phase.BOOT, Phase.PREPARE, Phase.ARMED, Phase.TRANSFER, Phase.COMMIT]
)
def test_a_stop_before_the_commit_cancels_the_handoff(make: Start, phase: Phase) -> None:
    run = make()
    # In ARMED a silent source worker too, or the first AtBoundary would begin TRANSFER.
    held = (0, 1, 2, 3) if phase is Phase.ARMED else (3,)
    for worker in held:
        run.cluster.faults.fail_at(worker, phase, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(phase)
    for worker in (0, 1):
        run.cluster.workers[worker].script.mute = False
    assert run.ask(m.StopRequest()).text == f"stopping after generation 1 ({phase})"
    assert run.outcome().state == "stopped"
    record = run.record(0)
    assert record.outcome == "aborted"
    assert record.detail == f"{phase}: the run is to stop: an operator's request"
    if phase is not Phase.BOOT:
        order = [type(message) for message in run.cluster.workers[0].script.received]
        assert order.index(m.Abort) < order.index(m.Resume) < order.index(m.Stop)


def test_a_stop_after_the_commit_waits_for_the_handoff(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(2, Phase.RELEASE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.RELEASE)
    assert run.status()["layout"] == "tp2 pp1 dp2"
    assert run.ask(m.StopRequest()).text == "stopping after generation 1 (RELEASE)"
    assert not run.cluster.got(0, m.Stop)
    joiner = run.cluster.workers[2]
    joiner.script.mute = False
    joiner.say(joiner.script.first_step())
    assert run.outcome().state == "stopped"
    assert run.record(0).detail == ""


# ---- requests


def _held_in_prepare(make: Start, **sections: Any) -> LiveRun:
    run = make(**sections)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    return run


def _let_go(run: LiveRun) -> None:
    held = run.cluster.workers[2]
    held.script.mute = False
    held.say([m.Prepared(worker=2, generation=1)])


def test_requests_during_a_handoff_are_queued_or_merged_and_told_so(make: Start) -> None:
    run = _held_in_prepare(make)
    first = run.resize("tp=2")
    assert first.text == (
        "queued: resize to tp2 pp1 dp1 (operator) waits behind generation 1 (PREPARE)"
    )
    merged = run.resize("pp=2")
    assert merged.text == (
        "merged: replaces queued resize to tp2 pp1 dp1 (operator); "
        "resize to tp1 pp2 dp1 (operator) waits behind generation 1 (PREPARE)"
    )
    assert run.ask(m.ReplaceRequest(replace=0)).text.startswith("queued: replace worker 0")
    assert run.ask(m.ReplaceRequest(replace=0)).text.startswith("merged: replaces queued replace")
    assert run.status()["queued"] == [
        "resize to tp1 pp2 dp1 (operator)",
        "replace worker 0 (operator)",
    ]
    _let_go(run)
    assert run.record(1).target == "tp1 pp2 dp1"
    run.until(lambda: run.phase() == "IDLE" and not run.status()["queued"], "the queue to empty")
    done = [(r.notice, r.outcome) for r in run.metrics.reconfigurations]
    assert done[0] == ("resize to tp2 pp1 dp2 (operator)", "completed")
    assert done[1] == ("resize to tp1 pp2 dp1 (operator)", "completed")


def test_a_queued_request_that_has_lost_its_point_is_dropped(make: Start) -> None:
    run = _held_in_prepare(make)
    assert run.resize("tp=2,dp=2").text.startswith("queued")
    _let_go(run)
    run.record(0)
    run.until(lambda: not run.status()["queued"], "the queue to empty")
    assert run.status()["last_event"] == (
        "dropped: resize to tp2 pp1 dp2 (operator): the run already has layout tp2 pp1 dp2"
    )
    assert len(run.metrics.reconfigurations) == 1


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (m.ResizeRequest(layout="dp=2"), "the run already has layout tp1 pp1 dp2"),
        (m.ResizeRequest(layout="dp=3"), "layout tp1 pp1 dp3 is not allowed; allowed are tp1 pp1"),
        (m.ResizeRequest(layout="dp=8"), "wants 8 workers, workers.max is 4; allowed are tp1 pp1"),
        (m.ResizeRequest(layout="dp=two"), "wanted tp=A,pp=B,dp=C, got 'dp=two'"),
        (m.ResizeRequest(layout="dp=0"), "every axis must be at least 1"),
        (m.ResizeRequest(workers=3), "no layout of 3 workers is allowed; allowed are tp1 pp1"),
        (m.ResizeRequest(workers=2), "the run already has layout tp1 pp1 dp2"),
        (m.ResizeRequest(), "either a layout or a number of workers"),
        (m.ResizeRequest(workers=2, layout="tp=2"), "either a layout or a number of workers"),
        (m.ReplaceRequest(replace=7), "worker 7 does not train; workers are [0, 1]"),
    ],
)
def test_requests_that_are_refused(make: Start, request_: m.FromOperator, wanted: str) -> None:
    run = make()
    reply = run.ask(request_)
    assert not reply.ok
    assert wanted in reply.text
    assert run.status()["handoff"] is None
    assert run.metrics.reconfigurations == []


def test_a_number_of_workers_takes_its_preferred_layout(make: Start) -> None:
    run = make()
    assert run.ask(m.ResizeRequest(workers=4)).text == "started: resize to tp2 pp1 dp2 (operator)"
    assert run.record(0).detail == ""


def test_requests_before_training_begins_wait_for_it(make: Start) -> None:
    run = make(begin=False)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    reply = run.resize("tp=2")
    assert (
        reply.text == "queued: resize to tp2 pp1 dp1 (operator) waits behind the start of the run"
    )
    run.until(lambda: 1 in run.cluster.workers, "worker 1 to connect")
    late = run.cluster.workers[1]
    late.script.mute = False
    late.channel.send(m.Hello(worker=1, pid=1, host="test", booted_s=0.0))
    assert run.record(0).detail == ""


def test_requests_to_a_run_that_stops_are_refused(make: Start) -> None:
    run = make()
    run.cluster.workers[1].script.mute = True
    run.ask(m.StopRequest())
    reply = run.resize("tp=2")
    assert (reply.ok, reply.text) == (False, "the run is about to end")
    run.cluster.workers[1].say([m.Finished(worker=1, step=0)])
    assert run.outcome().state == "stopped"


def test_scripted_notices_are_granted_in_order(make: Start) -> None:
    notices = [
        {"at_step": 4, "replace": 1},
        {"at_step": 1, "workers": 4},
        {"at_step": 4, "layout": {"dp": 7}},
        {"at_step": 5, "layout": {"tp": 2}},
    ]
    run = make(notices=notices)
    run.cluster.train(2)
    assert run.record(0).notice == "resize to tp2 pp1 dp2 (step 1)"
    run.cluster.train(3)
    assert run.record(1).notice == "replace worker 1 (step 4)"
    run.until(lambda: run.phase() == "IDLE", "the handoff to end")
    run.cluster.train(1)
    assert run.record(2).notice == "resize to tp2 pp1 dp1 (step 5)"
    assert [r.outcome for r in run.metrics.reconfigurations] == ["completed"] * 3


def test_scripted_notices_are_queued_but_never_merged(make: Start) -> None:
    notices = [{"at_step": 0, "layout": {"tp": 2}}, {"at_step": 0, "layout": {"pp": 2}}]
    run = _held_in_prepare(make, notices=notices)
    run.cluster.train(1)
    run.until(lambda: len(run.status()["queued"]) == 2, "both notices to be queued")
    _let_go(run)
    assert run.record(2).target == "tp1 pp2 dp1"
    assert run.record(1).target == "tp2 pp1 dp1"


# ---- strangers


def test_an_agent_that_is_not_expected_is_refused(make: Start) -> None:
    run = make()
    with pytest.raises(MeetingError, match="agent a9 is not expected"):
        run.cluster.desk.meet(Identity(agent="a9", host="h", pid=1, workers=1), SECRET)
    with pytest.raises(MeetingError, match="agent a0 has met already"):
        run.cluster.desk.meet(Identity(agent="a0", host="h", pid=1, workers=2), SECRET)


def test_a_second_connection_of_a_worker_is_turned_away(make: Start) -> None:
    run = make()
    where = json.loads((run.directory / "coordinator.json").read_text())
    stranger = connect((where["host"], where["port"]), SECRET, LIMIT_S, "the coordinator")
    stranger.send(m.Hello(worker=1, pid=1, host="test", booted_s=0.0))
    stranger.send(m.Failed(worker=1, generation=0, reason="not me"))
    with pytest.raises(ChannelClosed):
        stranger.receive(LIMIT_S)
    assert run.status()["state"] == "training"


def test_a_worker_that_speaks_for_another_fails_the_run(make: Start) -> None:
    run = make()
    run.cluster.workers[1].channel.send(m.Heartbeat(worker=0, step=0))
    assert run.outcome().reason.startswith("worker 1 sent")


# ---- the process


def _write_run(directory: Path, **sections: Any) -> None:
    (directory / "run.yaml").write_text(dump_run(tiny_run(**sections)))


def _scripted(cluster: ScriptedCluster) -> Callable[[RunConfig, Path, bytes], Services]:
    def build(config: RunConfig, directory: Path, secret: bytes) -> Services:
        cluster.secret = cluster.desk._secret = secret
        return Services(
            clock=SystemClock(),
            recipe=tiny_recipe(config),
            launcher=cluster.launcher,
            front_desk=cluster.desk,
            metrics=MemoryMetrics(),
        )

    return build


def test_the_process_stops_at_sigterm_and_leaves_its_outcome(tmp_path: Path) -> None:
    _write_run(tmp_path)
    cluster = ScriptedCluster(SECRET)
    before = signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "Begin")
        poll_until(lambda: bool(cluster.got(1, m.Begin)), deadline)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=terminate)
    killer.start()
    assert run_coordinator(str(tmp_path), _scripted(cluster)) == 0
    killer.join(LIMIT_S)

    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome == {"state": "stopped", "reason": "SIGTERM", "step": 0}
    assert not (tmp_path / "coordinator.json").exists()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert "[gen 0] INFO stopping: SIGTERM" in (tmp_path / "logs/coordinator.log").read_text()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_process_reports_a_run_file_that_does_not_exist(tmp_path: Path) -> None:
    assert run_coordinator(str(tmp_path), _scripted(ScriptedCluster(SECRET))) == 1
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert "run.yaml" in outcome["reason"]
