"""The two sides: processes that train when they are let, and what they say of their steps.

Both sides are alive for the whole measurement, warm; all but one are stopped by SIGSTOP.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from benchmarks.live_runs import LiveRun
from benchmarks.processes import living, send_signal
from benchmarks.steady_state.plain import run_rank
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.specs import load_run_recipe

POLL_S = 0.1
READY_S = 180.0


class Step(NamedTuple):
    """A step's end, in epoch seconds, and its loss."""

    step: int
    ended_s: float
    loss: float


class Side(ABC):
    """Processes that can be stopped and let go on. Running when it has been constructed; a context
    manager that ends them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @abstractmethod
    def processes(self) -> list[psutil.Process]:
        """All of them that are alive."""

    @abstractmethod
    def close(self) -> None:
        """Ends them."""

    def pause(self) -> None:
        """Stops every process where it is."""
        send_signal(self.processes(), signal.SIGSTOP)

    def resume(self) -> None:
        """Lets every process go on."""
        send_signal(self.processes(), signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that the living processes have used so far."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


class LiverRun(Side):
    """A whole run: coordinator, agent, workers, as `liver submit` starts them on this machine."""

    def __init__(self, config: RunConfig, event_s: float = READY_S, poll_s: float = POLL_S) -> None:
        self.live = LiveRun(config, event_s, poll_s)
        self.run = self.live.run

    def processes(self) -> list[psutil.Process]:
        return living(str(self.run.path))

    def steps(self) -> list[Step]:
        return [Step(row.step, row.ended_s, row.loss) for row in self.live.records().steps]

    def close(self) -> None:
        self.resume()
        self.live.close()


class PlainLoop(Side):
    """The plain loop's ranks, children of this process."""

    def __init__(self, config: RunConfig, layout: Layout, directory: Path) -> None:
        self._steps_path = directory / "steps"
        load_run_recipe(config, directory)  # derives what the ranks read
        context = multiprocessing.get_context("spawn")
        self._ranks: Sequence[Any] = [
            context.Process(target=run_rank, args=(rank, layout, config, directory), daemon=True)
            for rank in range(layout.workers)
        ]
        for rank in self._ranks:
            rank.start()

    def processes(self) -> list[psutil.Process]:
        for number, rank in enumerate(self._ranks):
            if rank.exitcode is not None:
                raise LiverError(f"rank {number} of the plain loop ended: {rank.exitcode}")
        return [psutil.Process(rank.pid) for rank in self._ranks]

    def steps(self) -> list[Step]:
        self.processes()
        if not self._steps_path.exists():
            return []
        lines = self._steps_path.read_text(encoding="ascii").split("\n")[:-1]
        fields = (line.split() for line in lines)
        return [Step(int(step), float(ended), float(loss)) for step, ended, loss in fields]

    def await_steps(self, count: int) -> None:
        """Until so many steps are done. Raises DeadlineError."""
        deadline = Deadline.after(SystemClock(), READY_S, f"step {count} of the plain loop")
        poll_until(lambda: len(self.steps()) >= count, deadline, POLL_S)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()
