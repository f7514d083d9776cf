"""A pool of worker processes: in each of them one Seat, whose methods the benchmark calls.

The benchmark's own process imports no torch. All workers are called at once, as most of what they
do is collective; one that fails or dies ends the pool, as the others would wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.host.process import collector_paused, raise_descriptor_limit

BOOT_S = 120.0


class _Answer(NamedTuple):
    """What a call gave; failure: the traceback of one that raised, else empty."""

    value: Any
    failure: str


class Pool:
    """So many workers, with ids from 0 on. directory: where they meet, and keep their data.

    A context manager; on leaving it no process of it lives.
    """

    def __init__(self, workers: int, directory: Path) -> None:
        # Forked from a process that has imported torch and megatron.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.transitions.imported"])
        self._connections: list[Any] = []
        self._processes = []
        for worker in range(workers):
            here, there = context.Pipe()
            arguments = (worker, directory, dict(os.environ), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            self._connections.append(here)
            self._processes.append(process)
            process.start()
            there.close()

    def __enter__(self) -> Pool:
        try:
            self._answers("boot", BOOT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def workers(self) -> int:
        return len(self._processes)

    def call(self, what: str, limit_s: float, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all Seats at once; what each gives, by worker.

        what: what they do, for errors. Raises LiverError with the traceback of a worker that
        fails, DeadlineError that names those that have not answered in time.
        """
        for channel in self._connections:
            channel.send((method, arguments))
        return self._answers(what, limit_s)

    def _answers(self, what: str, limit_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        waiting = dict(enumerate(self._connections))
        deadline = Deadline.after(SystemClock(), limit_s, what)
        while waiting:
            ready = connection.wait([*waiting.values()], deadline.remaining_s())
            if not ready:
                who = f"workers {sorted(waiting)} to {what}"
                raise Deadline(deadline.clock, deadline.at_s, limit_s, who).error()
            for worker, channel in [*waiting.items()]:
                if channel in ready:
                    found[worker] = self._answer(worker, what)
                    del waiting[worker]
        return [found[worker] for worker in range(self.workers)]

    def _answer(self, worker: int, what: str) -> Any:
        try:
            answer: _Answer = self._connections[worker].recv()
        except EOFError:
            self._processes[worker].join(BOOT_S)
            code = self._processes[worker].exitcode
            raise LiverError(f"worker {worker} ended with code {code} as it was to {what}") from None
        if answer.failure:
            raise LiverError(f"worker {worker} failed to {what}:\n{answer.failure}")
        return answer.value

    def _end(self) -> None:
        for channel in self._connections:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(worker: int, directory: Path, environment: dict[str, str], channel: Any) -> None:
    """A worker process's main: answers calls until the benchmark is gone."""
    os.environ.clear()
    os.environ.update(environment)
    # NCCL takes several processes on one GPU only where it believes them on different hosts.
    os.environ["NCCL_HOSTID"] = f"worker-{worker}"
    raise_descriptor_limit()
    try:
        with collector_paused():
            from benchmarks.transitions.seat import open_seat

            seat = open_seat(worker, directory)
        channel.send(_Answer(None, ""))
        while True:
            method, arguments = channel.recv()
            channel.send(_Answer(getattr(seat, method)(*arguments), ""))
    except EOFError:
        pass
    except BaseException:  # noqa: BLE001 - the benchmark shows it
        channel.send(_Answer(None, traceback.format_exc()))
    os._exit(0)  # gloo's threads may still wait for peers that have gone
