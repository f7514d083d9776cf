"""The Slurm job of a run, as somebody outside of it sees it."""

from __future__ import annotations

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, JobInfo, SlurmCommands
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome

_POLL_S = 0.5


class RunJob:
    """Job `job_id` of a run. Every method may raise SlurmError."""

    def __init__(self, run: RunDirectory, job_id: str, commands: SlurmCommands) -> None:
        self._run = run
        self._commands = commands
        self.job_id = job_id

    def find(self) -> JobInfo | None:
        """The job's first component; None once Slurm lists it no more."""
        return self._commands.jobs([self.job_id]).get(self.job_id)

    def is_over(self, or_queued: bool = False) -> bool:
        """Whether Slurm lists the job no more, or has it in its queue again where that is as good;
        False while the controller does not answer."""
        try:
            info = self.find()
        except ControllerUnreachable:
            return False
        return info is None or (or_queued and info.queued)

    def await_end(self, deadline: Deadline) -> None:
        """Returns when Slurm lists the job no more; raises DeadlineError."""
        poll_until(self.is_over, deadline, _POLL_S)

    def cancel(self, timeout_s: float) -> Outcome:
        """Ends the job, and tells how the run ended: a queued one has nobody else to say so.

        Raises DeadlineError when the job does not end.
        """
        deadline = Deadline.after(SystemClock(), timeout_s, f"job {self.job_id} to end")
        self._commands.cancel(self.job_id)
        self.await_end(deadline)
        if (outcome := self._run.outcome()) is not None:
            return outcome
        before = self._run.last_outcome()
        step = before.step if before is not None else 0
        outcome = Outcome("stopped", "cancelled before it trained", step)
        outcome.write(self._run.path)
        return outcome


def job_of(run: RunDirectory) -> RunJob | None:
    """None for a local run, and before it is known which job the run is.

    One question to Slurm, without patience: somebody waits for the answer.
    """
    config, job_id = run.config(), run.job_id()
    if config.cluster.kind != "slurm" or job_id is None:
        return None
    return RunJob(run, job_id, SlurmCommands(config.cluster.slurm.command_s, unreachable_s=0.0))


def gone(run: RunDirectory, job: RunJob | None) -> LiverError:
    what = "it" if job is None else f"its job {job.job_id}"
    return LiverError(f"run {run}: {what} is over and left no outcome; {run.where_logs_are()}")
