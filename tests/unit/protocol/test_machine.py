"""The handoff machine: every order of events, every failure at every moment; old world or new."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import ProtocolError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Requested,
    WorkerLost,
    WorldRef,
)
from liver_hpc.protocol.machine import HandoffMachine
from tests.fakes import Fault
from tests.unit.protocol.play import (
    CHANGES,
    DP2,
    TP2_DP2,
    WORKER_PHASES,
    Change,
    Play,
    changes,
    check,
    faults,
    orders,
)


@pytest.fixture
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    play = Play(CHANGES[getattr(request, "param", "grow")])
    play.begin()
    yield play
    check(play.machine)
    play.assert_never_a_mix()


@given(changes, orders, st.booleans())
def test_a_handoff_completes_in_every_order_of_events(
    change: Change, rng: random.Random, lingers: bool
) -> None:
    play = Play(change, lingers=lingers)
    play.begin()
    play.run(rng)

    assert play.outcome == Ended(4, "completed", "", WorldRef(4, change.target))
    play.assert_never_a_mix()


@settings(max_examples=300)
@given(changes, orders, st.data())
def test_any_faults_lead_to_the_old_world_or_the_new_never_a_mix(
    change: Change, rng: random.Random, data: st.DataObject
) -> None:
    play = Play(change)
    for fault in data.draw(st.lists(faults(change), min_size=1, max_size=3)):
        play.faults.fail_at(*fault)
    play.begin()
    play.run(rng)

    play.assert_never_a_mix()


@settings(max_examples=200)
@given(changes, orders, st.integers(0, 60))
def test_a_cancellation_at_any_moment_leads_to_the_old_world_or_the_new(
    change: Change, rng: random.Random, moment: int
) -> None:
    play = Play(change)
    play.begin()
    for _ in range(moment):
        if play.pending() and not play.over():
            play.step(rng.choice(play.pending()))
    if play.machine.phase is not Phase.IDLE:
        play.feed(Cancelled("the run is to stop"))
    play.run(rng)

    play.assert_never_a_mix()
    assert play.outcome is not None
    assert play.outcome.outcome in ("completed", "aborted")


@pytest.mark.parametrize("phase", WORKER_PHASES)
def test_a_lost_joiner_costs_only_the_attempt(phase: Phase) -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(3, phase)
    play.begin()
    play.run(random.Random(1))

    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert "joiner 3 lost" in play.outcome.detail
    assert play.failed == ""
    play.assert_never_a_mix()


@pytest.mark.parametrize("phase", [*WORKER_PHASES[1:], Phase.RELEASE])
def test_a_lost_source_worker_fails_the_run_and_is_named(phase: Phase) -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(1, phase)
    play.begin()
    play.run(random.Random(1))

    assert "worker 1 lost" in play.failed
    assert play.outcome is not None
    assert play.outcome.outcome == "failed"


def test_a_lost_joiner_after_the_commit_fails_the_run() -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(2, Phase.RELEASE)
    play.begin()
    play.run(random.Random(1))
    assert "worker 2 lost after the commit" in play.failed


@pytest.mark.parametrize("lingers", [True, False])
def test_a_leaver_that_dies_after_the_commit_is_expected(lingers: bool) -> None:
    play = Play(CHANGES["shrink"], lingers=lingers)
    play.faults.fail_at(1, Phase.RELEASE)
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "completed"


@pytest.mark.parametrize(
    ("phase", "limit", "worker", "wanted"),
    [
        (Phase.BOOT, 210.0, 3, "waited 210 s for Hello of 1 of 2 joiners"),
        (Phase.PREPARE, 180.0, 1, "waited 180 s for Prepared of workers 1"),
        (Phase.ARMED, 300.0, None, "waited 300 s for AtBoundary of workers 0-1, Vote of"),
        (Phase.TRANSFER, 120.0, 2, "waited 120 s for Vote of workers 2"),
    ],
)
def test_a_deadline_before_the_commit_aborts_and_names_whom_it_waited_for(
    phase: Phase, limit: float, worker: int | None, wanted: str
) -> None:
    play = Play(CHANGES["grow"])
    for silent in (worker,) if worker is not None else play.change.everybody:
        play.faults.fail_at(silent, phase, Fault.SILENT)
    play.begin()
    while play.pending():
        play.step(play.pending()[0])
    for script in play.scripts.values():
        script.mute = False
    deadline = play.machine.deadline
    assert play.machine.phase is phase
    assert deadline is not None
    assert deadline.limit_s == limit
    play.clock.advance(limit - 0.5)
    assert not deadline.expired()
    play.clock.advance(0.5)
    assert deadline.expired()
    play.feed(DeadlinePassed())
    play.run(random.Random(1))

    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert play.outcome.detail.startswith(f"{phase}: ")
    assert wanted in play.outcome.detail
    play.assert_never_a_mix()


@pytest.mark.parametrize(
    ("phase", "limit"),
    [(Phase.PREPARE, 270.0), (Phase.ARMED, 390.0), (Phase.TRANSFER, 210.0)],
)
def test_what_steps_take_comes_on_top_where_a_wait_has_some_in_it(
    phase: Phase, limit: float
) -> None:
    """Else each handoff to few workers would be called off, whose first step takes minutes."""
    play = Play(CHANGES["shrink"], steps_s=90.0)
    play.begin()
    while play.machine.phase is not phase:
        play.step(play.pending()[0])
    assert play.machine.deadline is not None
    assert play.machine.deadline.limit_s == limit
    told = [message for _, message in play.sent if isinstance(message, m.Prepare)]
    assert {message.steps_s for message in told} == {90.0}


def test_so_it_does_where_workers_that_train_are_to_hear_that_it_is_off() -> None:
    play = Play(CHANGES["shrink"], steps_s=900.0)
    play.begin()
    while play.machine.phase is not Phase.PREPARE:
        play.step(play.pending()[0])
    play.feed(Cancelled("an operator's request"))
    assert play.machine.phase is Phase.ABORT
    assert play.machine.deadline is not None
    assert play.machine.deadline.limit_s == 1200.0


@pytest.mark.parametrize(
    ("worker", "wanted"),
    [(0, "FirstStep of workers 0, Released of workers 0"), (2, "FirstStep of workers 2")],
)
def test_a_deadline_after_the_commit_fails_the_run(worker: int, wanted: str) -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(worker, Phase.RELEASE, Fault.SILENT)
    play.begin()
    play.run(random.Random(1))
    assert f"waited 60 s for {wanted}" in play.failed


def test_a_deadline_in_abort_fails_the_run_and_says_why_it_aborted() -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
    play.begin()
    play.run(random.Random(1))
    assert "ABORT: waited 300 s for Aborted of workers 0: PREPARE: waited 180 s" in play.failed


def test_a_shared_group_is_rebuilt_only_after_an_abort_at_the_boundary() -> None:
    rebuilt = {}
    for phase in WORKER_PHASES[1:]:
        play = Play(CHANGES["grow"])
        play.faults.fail_at(2, phase, Fault.FAIL)
        play.begin()
        play.run(random.Random(1))
        assert play.outcome is not None
        rebuilt[phase] = play.outcome.world.generation
        number = None if phase is Phase.PREPARE else 5
        assert play.got(0, m.Resume, rebuild_generation=number)
    assert rebuilt == {
        Phase.PREPARE: 3,
        Phase.ARMED: 5,
        Phase.TRANSFER: 5,
    }


def test_nothing_is_rebuilt_when_no_group_was_shared() -> None:
    play = Play(CHANGES["grow"])
    for script in play.scripts.values():
        script.kept_groups = 0
    play.faults.fail_at(2, Phase.TRANSFER, Fault.FAIL)
    play.begin()
    play.run(random.Random(1))
    assert play.got(0, m.Resume, rebuild_generation=None)


@pytest.mark.parametrize("worker", [0, 2])
def test_a_wrong_digest_aborts_and_the_text_says_whose(worker: int) -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(worker, Phase.TRANSFER, Fault.WRONG_DIGEST)
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert "digests differ" in play.outcome.detail
    assert f"{worker}" in play.outcome.detail.split("from worker ")[1].split(":")[0]


@pytest.mark.parametrize(
    ("worker", "outcome"), [(1, "aborted"), (2, "completed")], ids=["source", "joiner"]
)
def test_persistent_buffers_that_differ_between_copies_of_the_source_abort(
    worker: int, outcome: str
) -> None:
    def buffers(value: str) -> tuple[m.ClassDigest, ...]:
        digest = {"kind": "parameter", "tp_replicated": True, "multi_stage": False}
        return (m.ClassDigest(**digest, value=value),)

    play = Play(CHANGES["grow"])
    for each in play.change.source.workers:
        play.scripts[each].buffers = buffers(f"{7:016x}")
    play.scripts[worker].buffers = buffers(f"{8:016x}")
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == outcome
    said = "digests differ; persistent buffers: parameter (replicated over tp): source copy"
    assert (said in play.outcome.detail) == (outcome == "aborted")


@pytest.mark.parametrize(("side", "wrong"), [("", -1), ("source", 1), ("target", 0), ("target", 2)])
def test_digests_of_all_that_both_worlds_hold_decide_where_votes_tell_them(
    side: str, wrong: int
) -> None:
    """As in `handoff.digests: whole`: of a tensor that every worker has a copy of."""
    play = Play(CHANGES["grow"])
    play.begin()
    while play.machine.phase is not Phase.ARMED:
        play.step(play.pending()[0])
    for worker in play.change.everybody:
        told = {}
        for name, world in (("source", play.change.source), ("target", play.change.target)):
            if worker in world.workers:
                value = ("f" if (name, worker) == (side, wrong) else "0") * 16
                copy = {"tp_replicated": True, "multi_stage": False, "value": value}
                told[name] = (m.ClassDigest(kind="parameter", **copy),)
        *before, vote = play.mail[worker]
        assert isinstance(vote, m.Vote)
        play.mail[worker] = [*before, vote.model_copy(update=told)]
    play.run(random.Random(1))
    play.assert_never_a_mix()
    assert play.outcome is not None
    assert play.outcome.outcome == ("aborted" if side else "completed")
    assert ("digests differ; parameter" in play.outcome.detail) == bool(side)
    assert (f"(workers {wrong}) is ffff" in play.outcome.detail) == bool(side)


@pytest.mark.parametrize("worker", [0, 2])
def test_workers_with_different_specs_of_the_model_abort(worker: int) -> None:
    play = Play(CHANGES["grow"])
    play.scripts[worker].spec = "another"
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert "different specs of the model: {" in play.outcome.detail
    assert f"'another': {worker}" in play.outcome.detail


@pytest.mark.parametrize("worker", [0, 1])
def test_workers_at_different_boundaries_abort(worker: int) -> None:
    play = Play(CHANGES["grow"])
    play.scripts[worker].step = 12
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert "stand at different boundaries" in play.outcome.detail


def test_a_vote_may_overtake_another_workers_boundary(play: Play) -> None:
    while play.machine.phase is not Phase.ARMED:
        play.step(play.pending()[0])
    play.step(2)  # a joiner's vote, before any AtBoundary has been read
    assert play.machine.phase is Phase.TRANSFER
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "completed"


@pytest.mark.parametrize("phase", [Phase.BOOT, Phase.PREPARE, Phase.ARMED])
def test_the_end_of_training_ends_the_attempt_without_resume(phase: Phase) -> None:
    play = Play(CHANGES["grow"])
    play.begin()
    while play.machine.phase is not phase:
        play.step(play.pending()[0])
    play.feed(m.Finished(worker=0, step=60))
    play.feed(m.Finished(worker=1, step=60))

    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert "the run reached its end" in play.outcome.detail
    assert not any(isinstance(message, m.Resume) for _, message in play.sent)
    assert play.got(2, m.Exit) == (phase is not Phase.BOOT)
    assert play.got(0, m.Abort) == (phase is not Phase.BOOT)


def test_a_worker_that_finishes_during_the_abort_is_not_waited_for_nor_resumed() -> None:
    play = Play(CHANGES["grow"])
    play.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
    play.begin()
    while play.pending():
        play.step(play.pending()[0])
    play.feed(Cancelled("test"))
    play.feed(m.Finished(worker=0, step=60))
    play.feed(m.Finished(worker=1, step=60))

    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert not any(isinstance(message, m.Resume) for _, message in play.sent)


@pytest.mark.parametrize("play", ["shrink"], indirect=True)
def test_the_last_step_of_the_run_may_be_the_first_of_the_target(play: Play) -> None:
    while play.machine.phase is not Phase.RELEASE:
        play.step(play.pending()[0])
    for events in play.mail.values():
        events[:] = [event for event in events if isinstance(event, WorkerLost)]
    play.feed(m.Finished(worker=0, step=60))
    play.feed(m.Finished(worker=2, step=60))
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "completed"


def test_an_event_that_the_phase_does_not_allow_raises_with_the_history(play: Play) -> None:
    while play.machine.phase is not Phase.PREPARE:
        play.step(play.pending()[0])
    with pytest.raises(ProtocolError, match=r"unexpected FirstStep in phase PREPARE.*Requested"):
        play.feed(m.FirstStep(worker=0, generation=4, started_s=1.0, ended_s=2.0))
    play.run(random.Random(1))


def test_a_message_that_was_not_asked_for_raises(play: Play) -> None:
    while play.machine.phase is not Phase.PREPARE:
        play.step(play.pending()[0])
    with pytest.raises(ProtocolError, match=r"Prepared of worker 9, wanted Prepared of workers"):
        play.feed(m.Prepared(worker=9, generation=4))
    with pytest.raises(ProtocolError, match="a message of generation 2"):
        play.feed(m.Prepared(worker=0, generation=2))
    play.run(random.Random(1))


def test_joiners_take_the_seats_of_those_that_were_expected() -> None:
    machine = HandoffMachine(DeadlineSection(), FakeClock())
    source = WorldRef(0, RankMap(DP2, (0, 1)))
    requested = Requested(1, source, RankMap(TP2_DP2, (3, 0, 2, 1)), "test")
    assert machine.handle(requested) == [LaunchJoiners(1, 2, TP2_DP2)]
    assert machine.handle(m.Hello(worker=9, pid=9, host="h", booted_s=1.0)) == []
    (send,) = machine.handle(m.Hello(worker=5, pid=5, host="h", booted_s=1.0))
    assert isinstance(send, Send)
    assert isinstance(send.message, m.Prepare)
    assert send.message.target == m.WireRankMap.of(RankMap(TP2_DP2, (9, 0, 5, 1)))
    check(machine)


def test_joiners_take_seats_that_were_meant_for_their_nodes() -> None:
    """Those of node 7 were expected first, and come last; of node 8 came one more than wanted."""
    source = WorldRef(0, RankMap(Layout(1, 1, 1), (0,), (6,)))
    target = RankMap(Layout(1, 1, 5), (0, 1, 2, 3, 4), (6, 7, 7, 8, 8))
    requested = Requested(1, source, target, "test")
    placed = requested.target_with([9, 5, 7, 6], {5: 8, 6: 8, 7: 8, 9: 7})
    assert placed.workers == (0, 9, 7, 5, 6)
    assert placed.nodes == (6, 7, 8, 8, 8)
    assert requested.target_with([1, 2, 3, 4], {}).nodes == (6, -2, -3, -4, -5)
