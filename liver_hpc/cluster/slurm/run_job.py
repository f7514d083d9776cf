"""The Slurm job of a run, as somebody outside of it sees it."""

from __future__ import annotations

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome

_POLL_S = 0.5
_QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_CANCELLED = "cancelled before it trained"


class RunJob:
    """Job `job_id` of a run. Every method may raise SlurmError."""

    def __init__(self, run: RunDirectory, job_id: str, commands: SlurmCommands) -> None:
        self._run = run
        self._commands = commands
        self.job_id = job_id

    def find(self) -> JobInfo | None:
        """The job's first component; None once Slurm lists it no more."""
        listed = self._commands.jobs([self.job_id])
        return listed.get(self.job_id)

    def is_over(self) -> bool:
        """Whether Slurm lists the job no more; False while the controller does not answer."""
        try:
            return self.find() is None
        except ControllerUnreachable:
            return False

    def is_out_of_work(self) -> bool:
        """Whether nothing of the job runs: it is over, or queued again. False while the controller
        does not answer."""
        try:
            info = self.find()
        except ControllerUnreachable:
            return False
        return info is None or is_queued(info)

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
        outcome = Outcome("stopped", _CANCELLED, before.step if before is not None else 0)
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


def is_queued(info: JobInfo) -> bool:
    """Whether a job has not started, or will start again."""
    return info.state in _QUEUED


def job_text(info: JobInfo) -> str:
    """`queued as job 12: PENDING (Resources)`, `job 12 is RUNNING on n1`."""
    if is_queued(info):
        reason = f" ({info.reason})" if info.reason not in ("", "None") else ""
        return f"queued as job {info.job_id}: {info.state}{reason}"
    return f"job {info.job_id} is {info.state} on {','.join(info.nodes) or 'no node'}"


def gone(run: RunDirectory, job: RunJob | None) -> LiverError:
    what = "it" if job is None else f"its job {job.job_id}"
    return LiverError(f"run {run}: {what} is over and left no outcome; {run.where_logs_are()}")
