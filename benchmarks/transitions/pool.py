"""A pool of worker processes, each with one object in it whose methods the benchmark calls.

The benchmark's own process imports no torch. All workers are called at once, as most of what they
do is collective; one that fails or dies ends the pool, as the others would wait for it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.host.process import raise_descriptor_limit

BOOT_S = 120.0
END_S = 10.0


def forking() -> ForkServerContext:
    """What forks processes from one that has imported torch and megatron."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.transitions.imported"])
    return context


class _Answer(NamedTuple):
    """What a call gave; failure: the traceback of one that raised, else empty."""

    value: Any
    failure: str


class Pool:
    """So many workers, with ids from 0 on. A context manager; on leaving it no process of it lives.

    opened: makes the object of a worker id, in the worker's process. start: how processes begin;
    by default they are forked from one that has imported torch and megatron. seconds: how long
    calls took, by method.
    """

    def __init__(
        self, workers: int, opened: Callable[[int], Any], start: str = "forkserver"
    ) -> None:
        self.seconds: dict[str, float] = {}
        context: Any = forking() if start == "forkserver" else multiprocessing.get_context(start)
        self._connections: list[Any] = []
        self._processes = []
        for worker in range(workers):
            here, there = context.Pipe()
            arguments = (worker, opened, dict(os.environ), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Pool:
        try:
            self._answers("boot", BOOT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    @property
    def workers(self) -> range:
        return range(len(self._processes))

    def call(self, what: str, limit_s: float, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all workers' objects at once; what each gives, by worker.

        what: what they are to do, for errors. Raises LiverError with the traceback of a worker
        that fails, DeadlineError that names those that have not answered in time.
        """
        began_s = time.perf_counter()
        for channel in self._connections:
            channel.send((method, arguments))
        answers = self._answers(what, limit_s)
        took_s = time.perf_counter() - began_s
        self.seconds[method] = self.seconds.get(method, 0.0) + took_s
        return answers

    def _answers(self, what: str, limit_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        clock = SystemClock()
        ends_s = clock.now_s() + limit_s
        while len(found) < len(self.workers):
            missing = [worker for worker in self.workers if worker not in found]
            deadline = Deadline(clock, ends_s, limit_s, f"workers {missing} to {what}")
            waiting = {self._connections[worker]: worker for worker in missing}
            ready = connection.wait([*waiting], deadline.remaining_s())
            if not ready:
                raise deadline.error()
            for channel in ready:
                worker = waiting[channel]
                found[worker] = self._answer(worker, what)
        return [found[worker] for worker in self.workers]

    def _answer(self, worker: int, what: str) -> Any:
        try:
            answer: _Answer = self._connections[worker].recv()
        except EOFError:
            self._processes[worker].join(END_S)
            code = self._processes[worker].exitcode
            raise LiverError(f"worker {worker}, asked to {what}, ended: code {code}") from None
        if answer.failure:
            raise LiverError(f"worker {worker}, asked to {what}, failed:\n{answer.failure}")
        return answer.value

    def _end(self) -> None:
        for channel in self._connections:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(END_S)


def open_seat(directory: Path, worker: int, kind: str = "benchmarks.transitions.seat:Seat") -> Any:
    """Makes the calling process a worker, of a class of seats (seat.py). directory: shared by all
    of them."""
    from liver_hpc.world.device import open_device  # which imports torch

    device = open_device(worker)  # before megatron is imported, as in a worker
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name)(worker, device, directory)


def _serve(
    worker: int, opened: Callable[[int], Any], environment: dict[str, str], channel: Any
) -> None:
    """A worker process's main: answers calls until the benchmark is gone."""
    os.environ.clear()
    os.environ.update(environment)
    raise_descriptor_limit()
    try:
        seat = opened(worker)
        channel.send(_Answer(None, ""))
        while True:
            method, arguments = channel.recv()
            channel.send(_Answer(getattr(seat, method)(*arguments), ""))
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - the benchmark shows it
        channel.send(_Answer(None, traceback.format_exc()))
    os._exit(0)  # gloo's threads may still wait for peers that have gone
