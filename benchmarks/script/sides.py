"""The two sides: the script plainly by torchrun, and elastically as `liver submit` starts it.

Both are alive for the whole measurement, warm; one is stopped by SIGSTOP while the other trains.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.script.bootstrap import SCALARS
from benchmarks.script.plain import PlainJob, PlainRun, failure, read_scalars, start_plain
from benchmarks.steady_state.sides import LiverRun, Side
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout

EVENT_S = 600.0
"""The longest that anything may take."""
SETTLED_STEPS = 2
POLL_S = 0.05
_SCALARS_OF_A_STEP_BYTES = 1 << 14


class Outcome(NamedTuple):
    """Of one step."""

    loss: float
    grad_norm: float


class ScriptSide(Side):
    """A side whose training processes are known apart from what starts and watches them."""

    @abstractmethod
    def training(self) -> list[psutil.Process]:
        """The processes that train, of those that are alive."""

    @abstractmethod
    def reach(self, step: int) -> int:
        """Waits until so many steps have been done; returns how many have. Raises DeadlineError."""

    @abstractmethod
    def outcomes(self) -> Mapping[int, Outcome]:
        """What each step gave, by the number of steps done with it."""


def cpu_s_of(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """CPU seconds that each has used so far, by its number."""
    times = {process.pid: process.cpu_times() for process in processes}
    return {pid: float(each.user + each.system) for pid, each in times.items()}


class Plain(ScriptSide):
    """The script as its owner runs it."""

    def __init__(self, job: PlainJob, directory: Path) -> None:
        self._directory = directory
        self._child = start_plain(job, directory)

    def processes(self) -> list[psutil.Process]:
        if self._child.exit_code() is not None:
            raise failure(self._child, self._directory)
        torchrun = psutil.Process(self._child.pid)
        return [torchrun, *torchrun.children(recursive=True)]

    def training(self) -> list[psutil.Process]:
        return self.processes()[1:]

    def reach(self, step: int) -> int:
        deadline = Deadline.after(SystemClock(), EVENT_S, f"step {step} of the plain script")
        poll_until(lambda: bool(self.processes()) and self._done() >= step, deadline, POLL_S)
        return self._done()

    def _done(self) -> int:
        return max(self._run(_SCALARS_OF_A_STEP_BYTES).losses, default=0)

    def _run(self, last_bytes: int | None = None) -> PlainRun:
        """What it has said so far, or what is whole of the end of that."""
        try:
            data = (self._directory / SCALARS).read_bytes()
        except FileNotFoundError:
            data = b""
        cut = len(data) - (last_bytes or len(data))
        begin = data.find(b"\n", cut) + 1 if cut > 0 else 0
        return read_scalars(data[begin:].decode().split("\n")[:-1])

    def outcomes(self) -> Mapping[int, Outcome]:
        found = self._run()
        both = found.losses.keys() & found.grad_norms.keys()
        return {step: Outcome(found.losses[step], found.grad_norms[step]) for step in sorted(both)}

    def close(self) -> None:
        self._child.end(0)


class Elastic(LiverRun, ScriptSide):
    """A whole run: coordinator, agent, workers."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, EVENT_S, POLL_S)

    def training(self) -> list[psutil.Process]:
        workers = {*self.live.worker_pids().values()}
        return [each for each in self.processes() if each.pid in workers]

    def reach(self, step: int) -> int:
        return self.live.reach(step)

    def there_and_back(self, other: Layout, home: Layout) -> None:
        """Two handoffs, after which it trains as before."""
        for layout in (other, home):
            self.live.resize(layout)
            self.live.await_handoffs()
            self.live.settle(SETTLED_STEPS)

    def outcomes(self) -> Mapping[int, Outcome]:
        rows = self.live.records().steps
        return {row.step + 1: Outcome(row.loss, row.grad_norm) for row in rows}
