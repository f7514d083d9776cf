"""Micro-batches that are read ahead of the thread that computes them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from liver_hpc.host.process import quiet_thread
from liver_hpc.world.thread import MicroBatch

Fetch = Callable[[Sequence[Any]], Any]


class ReadAhead:
    """Reads what is wanted in a thread of its own, in order, at most `most` micro-batches ahead.

    fetch: reads one micro-batch's samples. Used by one thread, but for `close`. The thread begins
    with the first `want`; one of a pool would keep the interpreter from ending where it is stuck.
    """

    def __init__(self, fetch: Fetch, most: int) -> None:
        self._fetch = fetch
        self._most = most
        self._wanted: deque[MicroBatch] = deque()
        self._begun: dict[int, tuple[MicroBatch, Future[Any]]] = {}  # by identity
        self._orders: queue.SimpleQueue[tuple[MicroBatch, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def want(self, micro_batches: Iterable[MicroBatch]) -> None:
        """These are computed next, after all that was wanted before."""
        if not self._most:
            return
        self._wanted.extend(micro_batches)
        if self._thread is None:
            self._thread = quiet_thread(self._read_all, "read-ahead")
        self._begin()

    def read(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Each with its data; what nobody wanted is read in the calling thread. Raises what reading
        raises."""
        for micro_batch in micro_batches:
            _, reading = self._begun.pop(id(micro_batch), (None, None))
            self._begin()
            if reading is None:
                yield micro_batch, self._fetch(micro_batch.samples)
            else:
                yield micro_batch, reading.result()

    def _begin(self) -> None:
        while self._wanted and len(self._begun) < self._most:
            micro_batch, reading = self._wanted.popleft(), Future[Any]()
            self._begun[id(micro_batch)] = micro_batch, reading
            self._orders.put((micro_batch, reading))

    def close(self) -> None:
        """Ends the thread, once it has read what it reads; from any thread."""
        self._orders.put(None)

    # ---- the reading thread

    def _read_all(self) -> None:
        while (order := self._orders.get()) is not None:
            micro_batch, reading = order
            try:
                reading.set_result(self._fetch(micro_batch.samples))
            except BaseException as error:  # noqa: BLE001 - raised where it is wanted
                reading.set_exception(error)
            del order, micro_batch, reading
