"""Snapshots of late devices, which copy when somebody waits for it; and what goes wrong without
each wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError
from liver_hpc.snapshot import keeping
from liver_hpc.snapshot.keeping import Snapshots
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.world.steps import Flags
from tests.late_device import LateDevice, Machines
from tests.late_worlds import LateRun, LateWorld, late_worlds
from tests.unit.snapshot.rig import (
    ALONE,
    LIMIT_S,
    PAIR,
    Keeper,
    PlayedExchange,
    in_pair,
    played_exchanges,
)
from tests.unit.snapshot.states import share_of


@pytest.fixture(autouse=True)
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with played_exchanges(monkeypatch):
        yield


class LateKeeper(Keeper):
    """Its updates are launched, and done at some time after what they follow."""

    def __init__(self, seed: int, limit_s: float = LIMIT_S) -> None:
        self.machines = Machines(seed)
        self.late = LateDevice(self.machines, 4)
        super().__init__(4, 1, device=self.late, limit_s=limit_s)

    def begin(self) -> None:
        self.snapshots.begin(self.world, self.step)
        self.snapshots.taken()
        self.late.launch("an update", lambda: [view.add_(1.0) for view in self.world.views])


def wrong_steps(seed: int) -> list[int]:
    """Of some steps, those of which another state was sent than there was at their beginning."""
    one, plain = in_pair(LateKeeper(seed)), Keeper(4, None)
    plain.enter(PAIR, generation=0)
    wrong = []
    for step in range(4):
        wanted = share_of(plain.world.state)
        one.begin()
        # Training's host comes to the device meanwhile, as at the end of each step.
        if step % 2:
            one.late.training.wait()
        assert one.exchange.begun.wait(LIMIT_S)
        _, sent = one.exchange.sent[-1]
        one.cross()
        if sent != wanted.digests:
            wrong.append(step)
        flag = one.flags()
        one.agree(flag, flag)
        plain.begin()
    one.snapshots.halt()
    one.machines.stop()
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_what_is_sent_is_the_state_of_its_boundary_whatever_the_device_does_first(
    seed: int,
) -> None:
    assert wrong_steps(seed) == []


WAITS = {
    "the copy begins behind training": (keeping._Taking, "begin", "self._lane.follow()", "pass"),
    "it is made in the lane that is waited for": (
        keeping._Taking, "_take", "with self._lane.entered():", "if True:",
    ),
    "it is read when it is there": (keeping._Taking, "_take", "self._lane.finish(", "str("),
    "the update waits for it": (Snapshots, "taken", "if self._taking is not None:", "if False:"),
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_shows(wait: str, without: Any) -> None:
    owner, name, line, instead = WAITS[wait]
    without(owner, name, line, instead)
    assert wrong_steps(0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_world_is_let_go_once_nothing_reads_it(
    waits: bool, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        without(keeping._Taking, "close", "self.taken.wait(_ENDS_S)", "pass")
    take, begun = Snapshot.take, threading.Event()

    def slow_take(snapshot: Snapshot, *what: Any) -> None:
        begun.set()
        time.sleep(0.2)
        take(snapshot, *what)

    monkeypatch.setattr(Snapshot, "take", slow_take)
    one = in_pair(LateKeeper(0))
    one.snapshots.begin(one.world, 0)
    assert begun.wait(LIMIT_S)
    taking = one.snapshots._taking
    assert taking is not None
    wanted, (own, _) = share_of(one.world.state), taking.pending
    one.snapshots.halt()
    for view in one.world.views:
        view.fill_(-1.0)  # it is somebody else's memory
    taking.join(LIMIT_S)
    assert (own.digest() == wanted.digests) == waits


def test_a_copy_that_does_not_come_to_its_end_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "_ENDS_S", 0.2)
    one = in_pair(LateKeeper(0))
    one.machines.stopped.add("a copy")
    one.snapshots.begin(one.world, 0)
    began_s = SystemClock().now_s()
    one.snapshots.halt()
    assert SystemClock().now_s() - began_s < LIMIT_S / 2
    assert one.held == []
    one.machines.stop()


def test_memory_that_a_late_device_may_still_copy_into_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parked: list[object] = []
    monkeypatch.setattr(LateDevice, "park", lambda _device, held, _lane: parked.append(held))
    one = in_pair(LateKeeper(0, limit_s=0.2))
    one.machines.stopped.add("a copy")
    one.snapshots.begin(one.world, 0)
    taking = one.snapshots._taking
    assert taking is not None
    assert taking.done.wait(LIMIT_S)
    late = "waited 0.2 s for the device to copy the state into host memory: the device has not"
    assert late in taking.problem
    (own, _) = taking.pending
    one.snapshots.halt()
    assert parked == [own]
    assert not one.snapshots._memory._free
    one.machines.stop()


def test_training_waits_for_a_copy_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Snapshot, "take", lambda *_of: goes_on.wait(LIMIT_S))
    one = in_pair(LateKeeper(0, limit_s=0.2))
    one.snapshots.begin(one.world, 0)
    waits = r"waited 0\.2 s for the state to be copied into host memory"
    with pytest.raises(DeadlineError, match=waits):
        one.snapshots.taken()
    goes_on.set()
    one.snapshots.halt()
    one.machines.stop()


def test_a_partner_that_does_not_take_a_snapshot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(_exchange: object, _own: object, _wards: object, deadline: Deadline) -> None:
        time.sleep(deadline.remaining_s())
        deadline.check()

    monkeypatch.setattr(PlayedExchange, "swap", swap)
    one = in_pair(LateKeeper(0, limit_s=0.2))
    one.begin()
    taking = one.snapshots._taking
    assert taking is not None
    assert taking.done.wait(LIMIT_S)
    (told,) = one.said
    assert told.reason == "DeadlineError: waited 0.2 s for worker 5 to hold the snapshot"
    one.machines.stop()


class Noted:
    """In the place of `Snapshots`: what training asks of it."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        def ask(*_of: object) -> Flags | None:
            self._asked.append(name)
            return None if name == "newest_step" else Flags()

        return ask


def test_training_waits_for_the_copy_right_before_it_changes_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines, done = Machines(), list[str]()
    with late_worlds(monkeypatch, machines) as ledger:
        for name in ("forward_backward", "update", "agree"):
            monkeypatch.setattr(LateWorld, name, noting(done, name, getattr(LateWorld, name)))
        run = LateRun(machines, ALONE, ledger=ledger)
        (worker,) = ALONE.workers
        run._seat(worker).trainer._snapshots = Noted(done)  # type: ignore[assignment]
        run.begin()
        run.check(ALONE.workers)
    step = [
        "begin",
        "forward_backward",
        "taken",
        "update",
        "flags",
        "agree",
        "agreed",
        "newest_step",
    ]
    assert done == step * (len(done) // len(step))
    assert done


def noting(done: list[str], name: str, plain: Any) -> Any:
    def call(*given: Any) -> Any:
        done.append(name)
        return plain(*given)

    return call
