"""What a worker's own forward passes take: by this a slow node is told from a quick one, which a
step's time cannot, as all workers end a step together.

Only the recipe's forward of a micro-batch is timed: not the messages between stages, backward or
reductions, where a quick worker waits for a slow one. What waits in it, too, are collectives within
a tensor-, context- or expert-parallel group, whose members therefore look alike, and the gathering
of parameters where that is overlapped, so that the pass which it belongs to is not timed.

Nothing waits for a device: on a GPU a pass lies between two events of training's stream, which are
read once the device has passed both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

MOST_UNREAD = 1024
"""Passes that a device has not done yet; while there are more, further ones are not timed."""


class Total(NamedTuple):
    """So many forward passes took so long together."""

    passes: int = 0
    seconds: float = 0.0


class ForwardTimer(ABC):
    """The forward passes of one world on one worker; used by the thread that trains.

    total: of those that count and have ended; any thread may read it. skips_first: whether the
    first pass of a batch through each chunk waits for parameters of other replicas.
    """

    def __init__(self, skips_first: bool) -> None:
        self.total = Total()
        self._skips_first = skips_first
        self._trained = self._counts = False
        self._waited: set[int] = set()  # chunks that need not wait for parameters any more

    def begin_batch(self, trains: bool) -> None:
        """Before the passes of a batch. trains: not of an evaluation, nor rehearsed. The first one
        that trains does not count: kernels are chosen and memory is touched in it, and in a handoff
        state arrives beside it."""
        self.read()
        self._counts = trains and self._trained
        self._trained = self._trained or trains
        self._waited.clear()

    def begin(self, chunk: Any) -> Any:
        """Before a pass through a chunk of the model: what `end` wants; None where it is not
        timed."""
        if not self._counts:
            return None
        if self._skips_first and id(chunk) not in self._waited:
            self._waited.add(id(chunk))
            return None
        return self._mark()

    @abstractmethod
    def _mark(self) -> Any: ...

    @abstractmethod
    def end(self, begun: Any) -> None:
        """After the pass that `begin` has answered for."""

    @abstractmethod
    def read(self) -> None:
        """Adds up what has ended. Never waits."""

    def _add(self, passes: int, seconds: float) -> None:
        self.total = Total(self.total.passes + passes, self.total.seconds + seconds)


class HostTimer(ForwardTimer):
    """On a CPU a pass has ended when the call returns."""

    def _mark(self) -> float:
        return time.perf_counter()

    def end(self, begun: float | None) -> None:
        if begun is not None:
            self._add(1, time.perf_counter() - begun)

    def read(self) -> None:
        """All is added up already."""


class Event(Protocol):
    """What is used of a `torch.cuda.Event` with timing."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""


class DeviceTimer(ForwardTimer):
    """On a GPU; events are used again once they are read. new_event: of the calling thread's
    device."""

    def __init__(self, skips_first: bool, new_event: Callable[[], Event]) -> None:
        super().__init__(skips_first)
        self._new_event = new_event
        self._free: list[Event] = []
        self._unread: deque[tuple[Event, Event]] = deque()

    def _mark(self) -> Event | None:
        if len(self._unread) >= MOST_UNREAD:
            return None
        return self._recorded()

    def end(self, begun: Event | None) -> None:
        if begun is not None:
            self._unread.append((begun, self._recorded()))

    def read(self) -> None:
        while self._unread and self._unread[0][1].query():
            begun, ended = self._unread.popleft()
            self._add(1, begun.elapsed_time(ended) / 1e3)
            self._free += [begun, ended]

    def _recorded(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def _cuda_event() -> Event:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event  # type: ignore[no-any-return]


def new_timer(device: torch.device, skips_first: bool) -> ForwardTimer:
    """For what is computed on this device."""
    if device.type == "cuda":
        return DeviceTimer(skips_first, _cuda_event)
    return HostTimer(skips_first)
