"""The coordinator in a thread, beside a main thread that hears what Slurm's signals announce.

Python runs signal handlers in the main thread. Here it does nothing but wait, and holds no lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.config.schema import SlurmSection
from liver_hpc.coordinator.connections import Control
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome

END_REASON = "its job is about to end"
OUT_OF_TIME = "its job's time was up before its state was on disk"
_ASK_S = 2.0
_REQUEUE_S = 3.0
"""Of the time that is left, so much is kept for leaving and being queued again."""
_REQUEUE_SHARE = 0.25


class HostedCoordinator(Control):
    """A run's coordinator in a thread of this process. Everything may be called from a signal
    handler.

    started: whether it was.
    """

    def __init__(self, run_directory: Path) -> None:
        super().__init__()
        self.started = False
        self._run_directory = run_directory
        self._ended, self._not_ended = os.pipe()

    def start(self) -> None:
        """Once."""
        # What a killed one has left would send operators astray while this one boots.
        (self._run_directory / COORDINATOR_FILE).unlink(missing_ok=True)
        self.started = True
        # A daemon: once the time is up the process ends, whatever the coordinator waits for.
        threading.Thread(target=self._run, name="coordinator", daemon=True).start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Whether the coordinator has ended, after at most so many seconds."""
        # No lock: a handler may wait for the end while the code that it interrupted does, too.
        readable, _, _ = select.select([self._ended], [], [], limit_s)
        return bool(readable)

    def give_up(self) -> None:
        """The time is up, and the job is not queued again: the outcome of a coordinator that has
        not ended says so, and the process ends now."""
        if self.outcome is None:
            self.outcome = Outcome("failed", OUT_OF_TIME, self.steps_done)
            with contextlib.suppress(OSError):  # a full disk must not hold up the end
                self.outcome.write(self._run_directory)
                (self._run_directory / COORDINATOR_FILE).unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            from liver_hpc.coordinator.main import run_coordinator  # imports all that it needs

            self.outcome = run_coordinator(self._run_directory, control=self)
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


def requeue(slurm: SlurmSection, job_id: str) -> None:
    """Has the job that this process runs in begin again, which ends it now."""
    SlurmCommands(slurm.command_s, slurm.unreachable_s).requeue(job_id)


def _left_s(slurm: SlurmSection, job_id: str, now_s: float) -> float:
    """Seconds until Slurm ends a job: the window that was asked for, less where squeue says so.

    A job that is preempted has its grace time, whatever the window.
    """
    commands = SlurmCommands(min(_ASK_S, slurm.command_s), unreachable_s=0.0)
    try:
        info = commands.jobs([job_id]).get(job_id)
    except SlurmError:
        info = None
    if info is None or info.ends_s is None:
        return slurm.end_window_s
    return max(0.0, min(slurm.end_window_s, info.ends_s - now_s))
