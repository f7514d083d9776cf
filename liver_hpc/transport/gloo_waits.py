"""Waits for gloo's operations that fail, soon, where an operation will never end.

When a connection fails, gloo tells those who wait for what it has in its lists: not who waits for
the message that is being written or read in that moment, nor for one that its event loop has just
taken off a list to write it (`Pair::signalException` in its transport/tcp/pair.cc). They would wait
until the group's timeout. So a wait looks, every so often, whether gloo has closed all connections
of what it waits in, of a message all to its peer: nothing can come any more then, and nothing reads
or writes the operation's memory.

A collective is waited for in short waits, one after another. Not so a message: where a wait for one
comes to its limit, gloo closes all connections of the group. So another thread waits for messages,
without a limit, and the one that asks looks meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol

from liver_hpc.errors import TransferError
from liver_hpc.host.process import quiet_thread

# Any: torch's stubs know few of these names.
_native: Any = importlib.import_module("torch._C._distributed_c10d")
_plain_wait: Any = _native.Work.wait

_LOOK_S = 0.1
_LOOK = timedelta(seconds=_LOOK_S)
_LATE_S = 1.0
"""So long after its limit a wait for a message is given up that gloo has not ended."""
_WITHOUT_END = timedelta(0)
"""As torch has it: until the group's timeout."""
_MESSAGES = {int(getattr(_native.OpType, name)) for name in ("SEND", "RECV", "RECVANYSOURCE")}

MESSAGES = "gloo's messages"
"""What a thread is called that waits for them."""

Ended = Callable[[], bool]


class Groups(Protocol):
    """What one waits in."""

    def have_ended(self) -> bool:
        """Whether all their connections are closed."""
        ...

    def never_ends(self, work: Any) -> None:
        """A collective of theirs, on which a thread of gloo's waits until the timeout."""
        ...


class _Here(threading.local):
    """groups: what this thread waits in. waiter: the thread that waits for its messages."""

    groups: Groups | None = None
    waiter: _Waiter | None = None


_here = _Here()


@cache
def install() -> None:
    """Makes the waits of torch and megatron, within the groups of a world, end with those."""

    @functools.wraps(_plain_wait)
    def wait(work: Any, timeout: timedelta = _WITHOUT_END) -> Any:
        groups = _here.groups
        if groups is None or timeout:
            return _plain_wait(work, timeout)
        try:
            return wait_for(work, groups.have_ended)
        except TransferError:
            if not _is_message(work):
                groups.never_ends(work)
            raise

    _native.Work.wait = wait


@contextlib.contextmanager
def within(groups: Groups) -> Iterator[None]:
    """This thread waits in a world's groups."""
    before, _here.groups = _here.groups, groups
    try:
        yield
    finally:
        _here.groups = before


def wait_for(work: Any, ended: Ended, timeout: timedelta = _WITHOUT_END) -> bool:
    """torch's `wait` of one of gloo's operations. timeout: of a message.

    Raises TransferError where the operation never ends, as `ended` says of its connections;
    RuntimeError as torch does.
    """
    if _is_message(work):
        return _wait_for_message(work, ended, timeout)
    has_ended = False
    while True:
        try:
            return bool(_plain_wait(work, _LOOK))
        except RuntimeError:
            if work.is_completed():
                return bool(_plain_wait(work))  # its own result, or its own error
        if has_ended:
            raise _never()
        has_ended = ended()


def keep(works: Sequence[Any], kept: Sequence[Any]) -> None:
    """Keeps backends until collectives that never end have come to the groups' timeout: a backend
    that goes earlier waits for gloo's threads, and all of Python with it."""
    quiet_thread(partial(_wait_out, works, kept), "gloo's timeout")


def _wait_out(works: Sequence[Any], _kept: Sequence[Any]) -> None:
    for work in works:
        with contextlib.suppress(RuntimeError):
            _plain_wait(work)


def _is_message(work: Any) -> bool:
    return int(work._get_op_type()) in _MESSAGES


def _never() -> TransferError:
    return TransferError("all connections that it could cross are closed")


def _wait_for_message(work: Any, ended: Ended, timeout: timedelta) -> bool:
    # Not there for the next message unless it has told of this one.
    waiter, _here.waiter = _here.waiter or _Waiter(), None
    waiter.asked.put(partial(_plain_wait, work, timeout))
    has_ended = False
    late_s = time.monotonic() + timeout.total_seconds() + _LATE_S if timeout else math.inf
    while True:
        try:
            outcome = waiter.told.get(timeout=_LOOK_S)
        except queue.Empty:
            if has_ended:
                raise _never() from None
            if time.monotonic() > late_s:
                limit_s = timeout.total_seconds()
                raise RuntimeError(f"gloo has not ended its wait after {limit_s:g} s") from None
            has_ended = ended()
            continue
        _here.waiter = waiter
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class _Waiter:
    """Waits for messages, for one thread; its own ends when nobody has it any more."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        quiet_thread(partial(_wait_for_all, self.asked, self.told), MESSAGES)
        weakref.finalize(self, self.asked.put, None)


def _wait_for_all(
    asked: queue.SimpleQueue[Callable[[], bool] | None],
    told: queue.SimpleQueue[bool | Exception],
) -> None:
    while (wait := asked.get()) is not None:
        outcome: bool | Exception
        try:
            outcome = bool(wait())
        except Exception as error:  # noqa: BLE001 - who asked raises it
            outcome = error.with_traceback(None)
        del wait  # it holds the message's memory, and the connection
        told.put(outcome)
        del outcome
