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
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

MOST_UNREAD = 1024
"""Passes that are not read yet; while there are more, further ones are not timed."""


class Total(NamedTuple):
    """So many forward passes took so long together."""

    passes: int = 0
    seconds: float = 0.0


class HostEvent:
    """On a CPU, in the place of a `torch.cuda.Event`: all has been done when a call returns."""

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event._at_s - self._at_s) * 1e3


class ForwardTimer:
    """The forward passes of one world on one worker; used by the thread that trains.

    total: of those that count and have been read; any thread may ask. skips_first: whether the
    first pass of a batch through each chunk waits for parameters of other replicas. new_event: with
    timing, of the calling thread's device; events are used again once they are read.
    """

    def __init__(self, skips_first: bool, new_event: Callable[[], Any]) -> None:
        self.total = Total()
        self._skips_first = skips_first
        self._new_event = new_event
        self._free: list[Any] = []
        self._unread: deque[tuple[Any, Any]] = deque()
        self._trained = self._counts = False
        self._waited: set[int] = set()  # chunks that need not wait for parameters any more

    def begin_batch(self, trains: bool) -> None:
        """Before the passes of a batch: adds up those that have ended, and never waits. trains: not
        of an evaluation, nor rehearsed. The first one that trains does not count: kernels are
        chosen and memory is touched in it, and in a handoff state arrives beside it."""
        while self._unread and self._unread[0][1].query():
            begun, ended = self._unread.popleft()
            took_s = begun.elapsed_time(ended) / 1e3
            self.total = Total(self.total.passes + 1, self.total.seconds + took_s)
            self._free += [begun, ended]
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
        return self._recorded() if len(self._unread) < MOST_UNREAD else None

    def end(self, begun: Any) -> None:
        """After the pass that `begin` has answered for."""
        if begun is not None:
            self._unread.append((begun, self._recorded()))

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def new_timer(device: torch.device, skips_first: bool) -> ForwardTimer:
    """For what is computed on this device."""
    on_gpu = partial(torch.cuda.Event, enable_timing=True)
    return ForwardTimer(skips_first, on_gpu if device.type == "cuda" else HostEvent)
