"""A handoff in bounded memory: the source's memory goes once the checkpoint of the boundary stands,
and from then on the way back is that checkpoint."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Action, Ended, Send
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Event,
    Requested,
    StateSaved,
    WorkerLost,
    WorldRef,
)
from liver_hpc.protocol.machine import HandoffMachine
from tests.unit.protocol.play import CHANGES, Change, Play, changes, faults, orders

SOURCE, TARGET = RankMap(Layout(1, 1, 2), (0, 1)), RankMap(Layout(1, 2, 1), (1, 2))
SCALARS = m.ScalarState(step=5, consumed_samples=40, optimizer_step=5, loss_scale=1.0, seed=1)
EVERYBODY = (0, 1, 2)


class Bounded:
    """A machine that is ARMED, and all that it has said since."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.machine = HandoffMachine(DeadlineSection(), self.clock)
        self.actions: list[Action] = []
        self.feed(Requested(4, WorldRef(3, SOURCE), TARGET, "test", bounded=True))
        self.feed(m.Hello(worker=2, pid=2, host="h", booted_s=0.0))
        (prepare,) = (a.message for a in self.actions if isinstance(a, Send))
        assert isinstance(prepare, m.Prepare)
        assert prepare.bounded
        for worker in EVERYBODY:
            self.feed(m.Prepared(worker=worker, generation=4))
        assert self.machine.phase is Phase.ARMED
        self.actions.clear()

    def feed(self, event: Event) -> None:
        self.actions += self.machine.handle(event)

    def stand(self, worker: int) -> None:
        boundary = m.AtBoundary(worker=worker, generation=4, scalars=SCALARS, last_step_ended_s=0.0)
        self.feed(boundary)

    def told(self) -> list[tuple[int, ...]]:
        """Who was told that the source's memory may go."""
        sends = [action for action in self.actions if isinstance(action, Send)]
        return [send.workers for send in sends if isinstance(send.message, m.Boundary)]

    def ended(self) -> Ended:
        (ended,) = (action for action in self.actions if isinstance(action, Ended))
        return ended


@pytest.fixture
def bounded() -> Bounded:
    return Bounded()


def test_nothing_is_given_back_before_the_checkpoint_of_this_boundary_stands(
    bounded: Bounded,
) -> None:
    bounded.feed(StateSaved(4))  # of the step before
    bounded.stand(0)
    bounded.stand(1)
    assert bounded.told() == []
    bounded.feed(StateSaved(5))
    assert bounded.told() == [EVERYBODY]


def test_it_is_told_once(bounded: Bounded) -> None:
    for worker in (0, 1):
        bounded.stand(worker)
    bounded.feed(StateSaved(5))
    bounded.feed(StateSaved(5))
    bounded.feed(StateSaved(5, "it is too late to say so"))
    assert bounded.told() == [EVERYBODY]
    assert bounded.machine.phase is Phase.TRANSFER


def test_a_checkpoint_may_stand_before_all_say_that_they_do(bounded: Bounded) -> None:
    bounded.feed(StateSaved(5))
    bounded.stand(0)
    assert bounded.told() == []
    bounded.stand(1)
    assert bounded.told() == [EVERYBODY]


def test_a_checkpoint_that_cannot_be_written_calls_the_handoff_off(bounded: Bounded) -> None:
    """The source world is whole, and trains on."""
    bounded.stand(0)
    bounded.feed(StateSaved(5, "checkpoint of step 5 given up: disk full"))
    bounded.stand(1)
    for worker in (0, 1):
        bounded.feed(m.Aborted(worker=worker, generation=4))
    assert bounded.told() == []
    assert bounded.ended().outcome == "aborted"
    assert "the way back cannot be written: checkpoint of step 5 given up" in bounded.ended().detail


@pytest.mark.parametrize(
    "event",
    [
        WorkerLost(2, "killed"),
        m.Failed(worker=1, generation=4, reason="no memory"),
        m.Vote(worker=0, generation=4, ok=False, reason="the bytes differ", spec="s"),
    ],
)
def test_what_fails_once_memory_is_given_back_leads_to_the_checkpoint(
    bounded: Bounded, event: Event
) -> None:
    """A handoff that has failed begins this start of the run again."""
    for worker in (0, 1):
        bounded.stand(worker)
    bounded.feed(StateSaved(5))
    bounded.feed(event)
    assert bounded.ended().outcome == "failed"
    assert bounded.machine.phase is Phase.IDLE


def test_before_that_a_lost_joiner_costs_only_the_attempt(bounded: Bounded) -> None:
    bounded.stand(0)
    bounded.feed(WorkerLost(2, "killed"))
    bounded.stand(1)
    for worker in (0, 1):
        bounded.feed(m.Aborted(worker=worker, generation=4))
    assert bounded.ended().outcome == "aborted"


def test_the_checkpoint_of_another_step_that_failed_calls_nothing_off(bounded: Bounded) -> None:
    bounded.feed(StateSaved(4, "checkpoint of step 4 given up: disk full"))
    bounded.stand(0)
    bounded.stand(1)
    assert bounded.machine.phase is Phase.TRANSFER
    bounded.feed(StateSaved(5))
    assert bounded.told() == [EVERYBODY]


def test_the_transfer_has_its_time_from_when_the_checkpoint_stands(bounded: Bounded) -> None:
    limit_s = DeadlineSection().transfer_s
    bounded.stand(0)
    bounded.stand(1)
    bounded.clock.advance(limit_s - 1.0)
    bounded.feed(StateSaved(5))
    assert bounded.machine.deadline is not None
    assert bounded.machine.deadline.remaining_s() == pytest.approx(limit_s)
    bounded.clock.advance(limit_s)
    bounded.feed(DeadlinePassed())
    assert bounded.ended().outcome == "failed"
    assert "Vote" in bounded.ended().detail


def test_a_checkpoint_that_does_not_come_in_time_calls_the_handoff_off(bounded: Bounded) -> None:
    bounded.stand(0)
    bounded.clock.advance(DeadlineSection().checkpoint_s)
    bounded.feed(DeadlinePassed())
    assert bounded.machine.phase is Phase.ABORT
    assert bounded.told() == []


def test_who_writes_a_larger_part_has_the_time_of_a_checkpoint(bounded: Bounded) -> None:
    """From when the first one has written its own, and stands."""
    limits = DeadlineSection()
    bounded.stand(0)
    assert bounded.machine.deadline is not None
    assert bounded.machine.deadline.limit_s == limits.transfer_s + limits.checkpoint_s


@pytest.mark.parametrize("event", [Cancelled("the run is to stop"), WorkerLost(2, "killed")])
@pytest.mark.parametrize("stands", [(), (0,)], ids=["all write", "one writes"])
def test_a_worker_that_writes_is_waited_for_where_the_handoff_is_called_off_meanwhile(
    bounded: Bounded, event: Event, stands: tuple[int, ...]
) -> None:
    limits = DeadlineSection()
    for worker in stands:
        bounded.stand(worker)
    bounded.feed(event)
    assert bounded.machine.phase is Phase.ABORT
    assert bounded.machine.deadline is not None
    assert bounded.machine.deadline.limit_s == limits.boundary_s + limits.checkpoint_s


def test_a_checkpoint_that_is_waited_for_is_named(bounded: Bounded) -> None:
    bounded.stand(0)
    bounded.stand(1)
    bounded.clock.advance(DeadlineSection().checkpoint_s)
    bounded.feed(DeadlinePassed())
    assert bounded.machine.attempt is not None
    assert bounded.machine.attempt.reason.endswith("s for the checkpoint of the boundary")


def test_groups_that_the_target_took_over_are_no_reason_to_build_the_source_again() -> None:
    """Nothing is computed in them before the point of no return, and two worlds would not fit."""
    play = Play(CHANGES["same workers"], bounded=True, disk="disk full")
    play.begin()
    play.run(random.Random(1))
    assert play.outcome is not None
    assert play.outcome.outcome == "aborted"
    assert play.outcome.world == WorldRef(3, play.change.source)


@given(changes, orders)
def test_it_completes_in_every_order_of_events(change: Change, rng: random.Random) -> None:
    play = Play(change, bounded=True)
    play.begin()
    play.run(rng)
    assert play.outcome == Ended(4, "completed", "", WorldRef(4, change.target))
    play.assert_never_a_mix()


@settings(max_examples=200)
@given(changes, orders, st.sampled_from(["", "disk full"]), st.data())
def test_any_faults_lead_to_the_old_world_the_checkpoint_or_the_new_one(
    change: Change, rng: random.Random, disk: str, data: st.DataObject
) -> None:
    play = Play(change, bounded=True, disk=disk)
    for fault in data.draw(st.lists(faults(change), max_size=2)):
        play.faults.fail_at(*fault)
    play.begin()
    play.run(rng)
    play.assert_never_a_mix()
    freed = any(play.got(worker, m.Boundary) for worker in change.everybody)
    assert play.outcome is not None
    assert play.outcome.outcome in (("completed", "failed") if freed else ("aborted", "failed"))
