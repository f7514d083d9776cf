"""What a wire over a process group keeps when its backend fails."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import OpType

from liver_hpc.clock import Deadline, FakeClock
from liver_hpc.errors import DeadlineError, TransferError
from liver_hpc.transport import gloo_waits
from liver_hpc.transport.lane import InlineLane
from liver_hpc.transport.wire import NcclWire, Parcel, group_wire
from tests.nccl_groups import NcclGroups


class _Broken:
    """A group whose peer has gone; like torch's, its calls have no frames that know it."""

    @staticmethod
    def send(_memory: list[torch.Tensor], _rank: int, _tag: int) -> None:
        raise RuntimeError("Connection closed by peer")

    recv = send


@pytest.mark.parametrize("is_send", [True, False])
def test_an_error_in_starting_keeps_no_connection(is_send: bool) -> None:
    """Whoever waits for this worker is freed once it has closed, while its error still lives."""
    group = _Broken()
    gone = weakref.ref(group)
    wire = group_wire(group, {0: 0, 1: 1}, torch.device("cpu"))
    del group
    with pytest.raises(TransferError, match="worker 1: Connection closed") as failed:
        wire.launch([Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), is_send)])
    wire.close()
    assert failed.value.__traceback__ is not None
    assert gone() is None


class _Lost:
    """A message whose connection breaks while it is waited for."""

    def _get_op_type(self) -> int:
        return int(OpType.RECV)

    def wait(self, _limit: timedelta) -> None:
        raise RuntimeError("Connection closed by peer")


def test_an_error_in_waiting_keeps_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds the connections."""

    def wait(work: _Lost, limit: timedelta) -> None:  # the thread drops this frame
        work.wait(limit)

    monkeypatch.setattr(gloo_waits, "_plain_wait", wait)
    started: list[weakref.ref[_Lost]] = []

    class Group(_Broken):
        @staticmethod
        def recv(_memory: list[torch.Tensor], _rank: int, _tag: int) -> _Lost:
            work = _Lost()
            started.append(weakref.ref(work))
            return work

    wire = group_wire(Group(), {0: 0, 1: 1}, torch.device("cpu"))
    (pending,) = wire.launch([Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), False)])
    with pytest.raises(TransferError, match="worker 1: Connection closed") as failed:
        pending.wait(Deadline.after(FakeClock(), 5.0, "the bytes"))
    assert failed.value.__cause__ is not None
    assert started[0]() is None


class _Silent:
    """A group whose peer never answers. Like c10d's, a wait ends after whole milliseconds."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def recv(self, _memory: list[torch.Tensor], _rank: int, _tag: int) -> _Silent:
        return self

    def _get_op_type(self) -> int:
        return int(OpType.RECV)

    def wait(self, limit: timedelta) -> None:
        milliseconds = int(limit.total_seconds() * 1000)
        assert milliseconds > 0, "0 means for ever"
        self._clock.advance(milliseconds / 1000)
        raise RuntimeError("Timed out waiting for recv operation to complete")


@pytest.mark.parametrize("limit_s", [0.3, 0.2999, 0.0001])
def test_a_silent_peer_is_told_as_a_passed_deadline(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(gloo_waits, "_plain_wait", _Silent.wait)
    wire = group_wire(_Silent(clock), {0: 0, 1: 1}, torch.device("cpu"))
    (pending,) = wire.launch([Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), False)])
    with pytest.raises(DeadlineError, match="worker 1"):
        pending.wait(Deadline.after(clock, limit_s, "the bytes"))


class _Coalescing:
    """NCCL's group, in which the second message cannot be started."""

    def __init__(self, refused_by: str) -> None:
        self.groups = NcclGroups()
        self._start_coalescing, self._end_coalescing = self.groups.start, self.groups.end
        self._refused_by, self._started = refused_by, 0

    def send(self, _memory: list[torch.Tensor], _rank: int, _tag: int) -> None:
        self._started += 1
        if self._started == 2 and self._refused_by == "torch":
            raise RuntimeError("NCCL communicator was aborted")
        self.groups.message(refused=self._started == 2)


@pytest.mark.parametrize("refused_by", ["torch", "NCCL"])
def test_messages_that_cannot_be_started_leave_no_group_of_nccls_open(refused_by: str) -> None:
    """Else nothing runs that the thread gives NCCL later."""
    group = _Coalescing(refused_by)
    wire = NcclWire(group, {1: 1}, torch.device("cpu"), InlineLane())
    parcels = [Parcel(1, tag, torch.zeros(16, dtype=torch.uint8), True) for tag in (0, 1)]
    with pytest.raises(TransferError, match=r"message 1 .* 1: NCCL (communicator was|error)"):
        wire.launch(parcels)
    assert (group.groups.open, group.groups.counted) == (0, 0)


class _Slow:
    """A group that takes a while to end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.begun.set()
        assert self.may_end.wait(10)


def test_whoever_closes_while_another_thread_does_waits_for_the_end() -> None:
    """The memory of its messages is freed next."""
    group = _Slow()
    wire = NcclWire(group, {}, torch.device("cpu"), InlineLane())
    first, second = (threading.Thread(target=wire.close) for _ in range(2))
    first.start()
    assert group.begun.wait(10)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    group.may_end.set()
    for closing in (first, second):
        closing.join(10)
        assert not closing.is_alive()
