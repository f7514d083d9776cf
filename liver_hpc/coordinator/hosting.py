"""The coordinator in a thread, beside a main thread that hears what Slurm's signals announce.

Python runs signal handlers in the main thread. Here it does nothing but wait, and holds no lock.
"""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.config.schema import SlurmSection
from liver_hpc.run.outcome import COORDINATOR_FILE, OUTCOME_FILE, Outcome

if TYPE_CHECKING:
    from liver_hpc.coordinator.main import Control

END_REASON = "its job is about to end"
OUT_OF_TIME = "its job's time was up before its state was on disk"
_ASK_S = 2.0
_REQUEUE_S = 3.0
"""Of the time that is left, so much is kept for leaving and being queued again."""
_REQUEUE_SHARE = 0.25


class HostedCoordinator:
    """One life of a run's coordinator. Everything may be called from a signal handler."""

    def __init__(self, run_directory: str) -> None:
        self.exit_code: int | None = None
        self._run_directory = run_directory
        self._control: Control | None = None
        self._stop = ""
        self._end: tuple[str, float] | None = None
        self._ended, self._not_ended = os.pipe()

    def start(self) -> None:
        """Once. What was said before is said to the coordinator now."""
        # What a killed one has left would send operators astray while this one boots.
        (Path(self._run_directory) / COORDINATOR_FILE).unlink(missing_ok=True)
        from liver_hpc.coordinator.main import Control  # imports all that a coordinator needs

        self._control = Control()
        if self._end is not None:
            self._control.end_near(*self._end)
        elif self._stop:
            self._control.stop(self._stop)
        # A daemon: once the time is up the process ends, whatever the coordinator waits for.
        threading.Thread(target=self._live, name="coordinator", daemon=True).start()

    @property
    def started(self) -> bool:
        return self._control is not None

    @property
    def ending(self) -> bool:
        """Whether it was told that the end is near, after which nothing else matters."""
        return self._end is not None

    def stop(self, why: str) -> None:
        """The run is to stop at its next step boundary."""
        self._stop = why
        if self._control is not None and not self.ending:
            self._control.stop(why)

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The job ends at `deadline_s` (epoch): state to disk, to go on in another job."""
        self._end = (reason, deadline_s)
        if self._control is not None:
            self._control.end_near(reason, deadline_s)

    def wait(self, limit_s: float | None = None) -> bool:
        """Whether the coordinator has ended, after at most so many seconds."""
        # No lock: a handler may wait for the end while the code that it interrupted does, too.
        readable, _, _ = select.select([self._ended], [], [], limit_s)
        return bool(readable)

    def give_up(self) -> None:
        """The time is up, and nobody begins the run again: says so for a coordinator that has not
        ended, and that ends now."""
        path = Path(self._run_directory)
        if not (path / OUTCOME_FILE).exists():
            steps = self._control.steps_done if self._control is not None else 0
            Outcome("failed", OUT_OF_TIME, steps).write(path)
            (path / COORDINATOR_FILE).unlink(missing_ok=True)

    def _live(self) -> None:
        from liver_hpc.coordinator.main import run_coordinator

        try:
            self.exit_code = run_coordinator(self._run_directory, control=self._control)
        finally:
            os.close(self._not_ended)


def checkpoint_in_time(hosted: HostedCoordinator, slurm: SlurmSection, job_id: str) -> None:
    """Tells a coordinator that its job ends, and returns when it has ended for that, or when only
    the time to be queued again is left."""
    clock = SystemClock()
    # Before Slurm is asked for how long: agents that boot are ended by then, and would be missed.
    hosted.end_near(END_REASON, clock.now_s() + slurm.end_window_s)
    left_s = _left_s(slurm, job_id, clock.now_s())
    left_s -= min(_REQUEUE_S, _REQUEUE_SHARE * left_s)
    if hosted.started:
        hosted.wait(left_s)


def _left_s(slurm: SlurmSection, job_id: str, now_s: float) -> float:
    """Seconds until Slurm ends a job: the window that was asked for, less where squeue says so.

    A job that is preempted has its grace time, whatever the window.
    """
    commands = SlurmCommands(min(_ASK_S, slurm.command_s), unreachable_s=0.0)
    try:
        info = commands.jobs([job_id], retry=False).get(job_id)
    except SlurmError:
        info = None
    if info is None or info.ends_s is None:
        return slurm.end_window_s
    return max(0.0, min(slurm.end_window_s, info.ends_s - now_s))
