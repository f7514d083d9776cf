"""Which of torch's streams communicators over NCCL and lanes get.

torch has 32 streams of a priority on a device, and gives them out in turn: whoever asks after the
last one gets the first one again. A communicator takes the next one when it connects. With that of
another one that lives, what connects it would wait on the device behind the other one's
collectives, which training launches whenever it comes to them: on one worker before, on another one
behind, so that both wait for each other. So streams are drawn here until the next one is nobody's.

The memory that cuBLAS keeps for a stream on which a product was computed, 32 MiB on Hopper, stays.
So a lane gets the stream of one that is gone; and no two that live have the same.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

log = logging.getLogger(__name__)

_HIGHEST = -100
"""More than there is: torch takes the highest priority of the device, as it does for NCCL."""
_MOST = 1024
"""So many streams in turn are no turn."""


class LaneStreams:
    """The streams of lanes, of the lowest priority, on one device; from any thread.

    draw: gives torch's next one.
    """

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw
        self._known: set[int] = set()  # handles
        self._free: deque[Any] = deque()
        self._lock = threading.Lock()

    def take(self, lane: object) -> Any:
        """A stream that is the lane's as long as that lives."""
        with self._lock:
            stream = self._ended() or self._drawn()
        weakref.finalize(lane, self._free.append, stream)
        return stream

    def _ended(self) -> Any:
        """One of a lane that is gone, which has done all that was launched there; None without."""
        for _ in range(len(self._free)):
            stream = self._free.pop()  # the last one: few are used, and keep memory
            if stream.query():
                return stream
            self._free.appendleft(stream)
        return None

    def _drawn(self) -> Any:
        """One that no lane has had."""
        for _ in range(len(self._known) + 1):
            stream = self._draw()
            if stream.cuda_stream not in self._known:
                break
        else:
            log.warning("all %d streams have a lane: two share one", len(self._known))
        self._known.add(stream.cuda_stream)
        return stream


class Streams:
    """The streams of the highest priority on one device, and whose they are; from any thread.

    draw: gives the handle of torch's next one.
    """

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._turn: list[int] = []  # handles, in torch's order
        self._of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def make_room(self) -> int:
        """The place of the stream that torch gives out next, which no backend has that lives; -1
        where there is none."""
        with self._lock:
            if not self._turn:
                self._turn = self._learn()
            taken = {*self._of.values()}
            for _ in self._turn:
                place = (self._turn.index(self._draw()) + 1) % len(self._turn)
                if place not in taken:
                    return place
            if self._turn:
                log.warning("all %d streams have a communicator: two share one", len(self._turn))
            return -1

    def take(self, backend: Any, place: int) -> None:
        """A backend is about to connect, and gets that one."""
        with self._lock:
            self._of[backend] = place

    def _learn(self) -> list[int]:
        """A whole turn."""
        handles = [self._draw()]
        while len(handles) < _MOST:
            if (handle := self._draw()) == handles[0]:
                return handles
            handles.append(handle)
        log.warning("torch gives out more than %d streams: none are looked at", _MOST)
        return []


def streams_of(device: torch.device) -> Streams:
    """Those of a CUDA device."""
    make: type[torch.cuda.Stream] = torch.cuda.Stream
    return Streams(lambda: int(make(device, priority=_HIGHEST).cuda_stream))


@lru_cache
def lane_streams(device: torch.device) -> LaneStreams:
    """Those of a CUDA device."""
    make: type[torch.cuda.Stream] = torch.cuda.Stream
    return LaneStreams(lambda: make(device))
