from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.errors import DeadlineError
from liver_hpc.handoff import session
from liver_hpc.handoff.session import HandoffAborted, Session, Target, WorldHalted
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.messages import (
    Abort,
    Arm,
    Boundary,
    Halt,
    Prepare,
    Resume,
    ScalarState,
    Verdict,
    WireRankMap,
)
from liver_hpc.world.context import WorkerContext
from tests.unit.config.runs import minimal

unused: Any = None
SMALL = ScalarState(step=3, consumed_samples=24, optimizer_step=3, loss_scale=1.0, seed=1)


class FakeStore:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def session_of(worker: int) -> tuple[Session, FakeStore]:
    """Worker `worker` in a handoff from workers 0, 1 to workers 1, 2."""
    store = FakeStore()
    unused: Any = None
    context = WorkerContext(
        checkpoints=Path("checkpoints"),
        worker=worker,
        config=minimal(),
        recipe=unused,
        device=unused,
        network=unused,
        clock=SystemClock(),
        send=lambda _message: None,
        open_store=lambda: store,  # type: ignore[arg-type,return-value]
    )
    prepare = Prepare(
        generation=4,
        source=WireRankMap.of(RankMap(Layout(1, 1, 2), (0, 1))),
        source_generation=3,
        target=WireRankMap.of(RankMap(Layout(2, 1, 1), (1, 2))),
    )
    return Session(prepare, context), store


def test_roles_and_members() -> None:
    leaver, stayer, joiner = (session_of(worker)[0] for worker in (0, 1, 2))
    assert (leaver.is_source, leaver.is_target) == (True, False)
    assert (stayer.is_source, stayer.is_target) == (True, True)
    assert (joiner.is_source, joiner.is_target) == (False, True)
    assert joiner.members == (0, 1, 2)


def test_an_abort_lowers_the_ready_flag_and_ends_what_waits_in_the_store() -> None:
    session, store = session_of(1)
    session.open_store()
    session.deliver(Arm(generation=4))
    assert session.armed.is_set()
    session.deliver(Abort(generation=4, reason="joiner 2 lost"))
    assert not session.armed.is_set()
    assert store.closed
    with pytest.raises(HandoffAborted, match="joiner 2 lost"):
        session.check()


def test_a_store_opened_after_the_abort_is_closed_at_once() -> None:
    session, store = session_of(1)
    session.deliver(Abort(generation=4, reason="late"))
    session.open_store()
    assert store.closed


def test_an_arm_after_the_abort_does_not_raise_the_flag() -> None:
    session, _ = session_of(1)
    session.deliver(Abort(generation=4, reason="first"))
    session.deliver(Arm(generation=4))
    assert not session.armed.is_set()


def test_waiting_for_a_verdict_ends_in_it_in_the_abort_or_at_the_deadline() -> None:
    session, _ = session_of(1)
    session.deliver(Arm(generation=4))
    verdict = Verdict(generation=4, scalars=SMALL)
    threading.Timer(0.05, session.deliver, (verdict,)).start()
    assert session.wait(Verdict, 5.0, "the verdict") == verdict
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the second verdict"):
        session.wait(Verdict, 0.05, "the second verdict")
    session.deliver(Abort(generation=4, reason="digests differ"))
    with pytest.raises(HandoffAborted, match="digests differ"):
        session.wait(Verdict, 5.0, "the verdict")


def test_a_resume_is_waited_for_past_the_abort() -> None:
    session, _ = session_of(1)
    session.deliver(Abort(generation=4, reason="x"))
    session.deliver(Resume(generation=4, rebuild_generation=5))
    assert session.wait(Resume, 1.0, "all to go back").rebuild_generation == 5


def test_what_has_been_opened_ends_with_the_attempt_and_what_is_opened_later_at_once() -> None:
    session, _ = session_of(1)
    ended, wire, late = threading.Event(), FakeStore(), FakeStore()
    told = list[bool]()
    session.call_at_end(told.append)
    session.close_at_end(wire)  # type: ignore[arg-type]
    session.call_at_end(lambda _shared: ended.set())
    session.deliver(Abort(generation=4, reason="x"))
    assert ended.wait(10.0)
    assert (told, wire.closed) == ([False], True)
    session.close_at_end(late)  # type: ignore[arg-type]
    assert late.closed


def test_an_abort_ends_each_wait_that_comes_after_it_too() -> None:
    """Whoever has taken it out may have been ended by something else that it has broken."""
    session, _ = session_of(2)
    session.deliver(Abort(generation=4, reason="a joiner is lost"))
    for wanted in (Boundary, Verdict):
        with pytest.raises(HandoffAborted, match="a joiner is lost"):
            session.wait(wanted, 1.0, "a word")
    resume = Resume(generation=4)
    session.deliver(resume)
    assert session.wait(Resume, 1.0, "all to go back") is resume


def test_a_halt_ends_all_that_an_abort_ends_and_the_wait_to_resume_too() -> None:
    session, store = session_of(1)
    session.open_store()
    session.deliver(Arm(generation=4))
    session.deliver(Resume(generation=4))
    session.deliver(Halt(generation=3, reason="worker 0 is lost"))
    assert store.closed
    session.deliver(Arm(generation=4))
    assert not session.armed.is_set()
    for wanted in (Boundary, Verdict, Resume):
        with pytest.raises(WorldHalted, match="worker 0 is lost"):
            session.wait(wanted, 1.0, "a word")
    store.closed, wire = False, FakeStore()
    session.open_store()
    session.close_at_end(wire)  # type: ignore[arg-type]
    assert (store.closed, wire.closed) == (True, True)


def test_a_leaver_whose_state_is_still_read_is_not_done_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MOVING_ENDS_S", 0.05)
    reads = threading.Event()
    moving = threading.Thread(target=reads.wait, daemon=True)
    moving.start()
    transport: Any = FakeStore()
    leaver = Target(None, {}, transport, unused, 0, {}, moving)
    assert not leaver.drop()
    reads.set()
    moving.join()
    assert leaver.drop()


class FakeWorld:
    def __init__(self) -> None:
        self.let_go: list[str] = []

    def close(self) -> None:
        self.let_go.append("freed")

    def abandon(self, *, written_to: bool) -> None:
        self.let_go.append("kept until the device has ended" if written_to else "kept")


@pytest.mark.parametrize(
    ("moves", "computes", "let_go"),
    [
        (False, False, "freed"),
        (True, False, "kept"),
        (False, True, "kept until the device has ended"),
    ],
)
def test_memory_that_may_still_be_written_to_is_not_freed(
    monkeypatch: pytest.MonkeyPatch, moves: bool, computes: bool, let_go: str
) -> None:
    monkeypatch.setattr(session, "MOVING_ENDS_S", 0.05 if moves else 10.0)
    ends = threading.Event()
    moving = threading.Thread(target=ends.wait, daemon=True)
    moving.start()
    # It ends at its next message, once the transport is closed.
    transport: Any = SimpleNamespace(close=lambda: None if moves else ends.set())
    device: Any = SimpleNamespace(aborted_has_ended=lambda: not computes)
    world: Any = FakeWorld()
    target = Target(world, {}, transport, device, 0, {}, moving)
    assert target.drop() == (let_go == "freed")
    assert world.let_go == [let_go]
    ends.set()
