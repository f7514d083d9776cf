"""The Slurm job of a run: as the process in it sees it, and as somebody outside of it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from shutil import which

from pydantic import BaseModel, ConfigDict, ValidationError

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, DeadlineError, LiverError
from liver_hpc.host.files import file_lock, locked_alone, write_whole
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, last_end, steps_done
from liver_hpc.run.outcome import AGAIN_FILE, REQUEUE, Outcome

JOB_FILE = "job.json"
JOB_POLL_S = 1.0

_TOLD_TO_A_PROCESS = {"request", "run_file", "job_name", "array_task"}
"""Not of a start: a step of the job may be told another name for it, and Slurm may not answer."""

Ask = Callable[[str], Mapping[str, str]]
"""The record of a job by its id; empty of one that is not known."""


class OwnJob(BaseModel):
    """One start of the job that this process runs in. An id alone is not enough: a new cluster
    begins again at 1, and the largest id is followed by the first.

    started: when, as Slurm writes it; empty where it does not. restarts: how often it was queued
    again. array_task: such as "77_4"; the id of one task of an array may be that of all of it.
    Where Slurm is not asked it is known of that task alone.
    job_name: by it a job that Slurm gives the same id later is told from this one.
    request: what `liver run` was asked: the absolute path of its run file, and the overrides; none
    of another command. run_file: the sha256 of what stood in that file.
    """

    model_config = ConfigDict(frozen=True)

    job_id: str
    cluster: str = ""
    started: str = ""
    restarts: int = 0
    array_task: str = ""
    job_name: str = ""
    request: tuple[str, ...] = ()
    run_file: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str], ask: Ask | None = None) -> OwnJob | None:
        """None outside of a job. `ask`, which may raise SlurmError, is Slurm's record of it.

        A job that was submitted from within another one inherits what Slurm told that one and does
        not tell every job: its array, and how often it was queued again.
        """
        job_id = environment.get("SLURM_JOB_ID", "")
        if not job_id:
            return None
        array = environment.get("SLURM_ARRAY_JOB_ID", "")
        task = environment.get("SLURM_ARRAY_TASK_ID", "")
        restarts = environment.get("SLURM_RESTART_COUNT") or "0"
        record: Mapping[str, str] = {}
        if ask is not None and (array or restarts != "0"):
            with suppress(SlurmError):
                record = ask(job_id)
        if record:
            array, task = record.get("ArrayJobId", ""), record.get("ArrayTaskId", "")
            restarts = record.get("Restarts", restarts)
        elif array != job_id:
            array = ""
        return cls(
            job_id=job_id,
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
            started=environment.get("SLURM_JOB_START_TIME", ""),
            restarts=int(restarts),
            array_task=array and f"{array}_{task}",
            job_name=environment.get("SLURM_JOB_NAME", ""),
        )

    def asking(self, config_path: Path, overrides: Sequence[str], text: str) -> OwnJob:
        """For a run of a file with that text."""
        request = (str(config_path.absolute()), *overrides)
        run_file = sha256(text.encode()).hexdigest()
        return self.model_copy(update={"request": request, "run_file": run_file})

    def made(self, run_directory: Path) -> bool:
        """Whether this start of the job, or an earlier one, noted itself in `run_directory`. One
        that was queued again also finds a directory of its name in which nobody has: its first
        start was killed before it could."""
        try:
            noted = OwnJob.model_validate_json((run_directory / JOB_FILE).read_bytes())
        except FileNotFoundError:
            return self.restarts > 0 and run_directory.name.endswith(f"-{self.job_id}")
        except ValidationError:
            return False
        if (noted.job_id, noted.cluster) != (self.job_id, self.cluster):
            return False
        return self.restarts > noted.restarts or self._is_start_of(noted)

    def made_now(self, run_directory: Path) -> bool:
        """Whether this start of the job noted itself there."""
        noted = OwnJob.noted(run_directory)
        return noted is not None and self._is_start_of(noted)

    def asks_for(self, run_directory: Path, name: str) -> bool:
        """Whether this request is the one by which this job made a directory. The run file may have
        been changed since an earlier start; within one start another text is another request. By a
        run's name where no request is noted."""
        noted = OwnJob.noted(run_directory)
        if noted is None or not noted.request:
            return run_directory.name.startswith(f"{name}-{self.job_id}")
        if self.request != noted.request:
            return False
        return self.run_file == noted.run_file or not self._is_start_of(noted)

    def finds_changed(self, run_directory: Path) -> bool:
        """Whether something else stands in the run file than when the job looked last."""
        noted = OwnJob.noted(run_directory)
        return noted is not None and noted.run_file not in ("", self.run_file)

    @contextmanager
    def alone(self, runs: Path, *what: str) -> Iterator[None]:
        """Of what one process may do at a time in this start of the job, such as to look for its
        run in `runs`, which takes a while. Raises ConfigError where another one does it, or no lock
        can be had there."""
        name = sha256("\0".join((self.start, *what)).encode()).hexdigest()
        with ExitStack() as held:
            try:
                held.enter_context(locked_alone(runs / f".{name}.lock"))
            except BlockingIOError:
                raise ConfigError(
                    f"another `liver run` of job {self.job_id} is under way: one at a time has a "
                    "run, and one run on Slurm its job's nodes"
                ) from None
            except OSError as error:
                why = f"{error.strerror}; its file system wants flock"
                raise ConfigError(f"{runs}: no lock can be had there: {why}") from error
            yield

    @property
    def start(self) -> str:
        """What no other start of a job has."""
        return self.model_dump_json(exclude=_TOLD_TO_A_PROCESS)

    def is_queued_again(self, command_s: float) -> bool:
        """Whether Slurm says that it has done so since this start, which it takes for over then."""
        with suppress(SlurmError):
            record = SlurmCommands(command_s, unreachable_s=0.0).record(self.job_id)
            return int(record.get("Restarts", "0")) > self.restarts
        return False

    def _is_start_of(self, noted: OwnJob) -> bool:
        return self.start == noted.start

    @classmethod
    def noted(cls, run_directory: Path) -> OwnJob | None:
        """The one that noted itself there last, where that can be read."""
        with suppress(FileNotFoundError, ValidationError):
            return cls.model_validate_json((run_directory / JOB_FILE).read_bytes())
        return None

    @staticmethod
    def noted_s(run_directory: Path) -> float:
        """When a job last noted itself there: of several jobs of one id the last one still runs."""
        path = run_directory / JOB_FILE
        return path.stat().st_mtime if path.exists() else 0.0

    def note(self, run_directory: Path) -> None:
        """Raises OSError."""
        write_whole(run_directory / JOB_FILE, self.model_dump_json() + "\n", mode=0o600)


@dataclass(frozen=True)
class RunJob:
    """Job `job_id` of a run. Every method may raise SlurmError."""

    run: RunDirectory
    job_id: str
    commands: SlurmCommands

    def find(self) -> JobInfo | None:
        """The job's first component; None once Slurm lists it no more. Raises ConfigError where
        it may be listed in another cluster."""
        info = own_job(self.run, self.commands.jobs([self.job_id]).get(self.job_id))
        if info is None:
            self.check_cluster()
        return info

    def check_cluster(self) -> None:
        """Raises ConfigError for a run without an outcome whose job ran in another cluster than
        the one that is asked here, which knows nothing of it."""
        noted = _noted_as(self.run, self.job_id)
        if noted is None or not noted.cluster:
            return
        if self.run.outcome() is not None:
            return
        here = self.commands.setting("ClusterName")
        if here.lower() != noted.cluster.lower():
            raise ConfigError(
                f"run {self.run}: its job {self.job_id} is one of cluster {noted.cluster}, and "
                f"here is {here}; give the command there, or, where that cluster is gone for "
                f"good, remove {self.run}/{JOB_FILE}"
            )

    def is_over(self, or_queued: bool = False) -> bool:
        """Whether Slurm lists the job no more, or has it in its queue again where that is as good;
        False while the controller does not answer."""
        try:
            info = self.find()
        except ControllerUnreachable:
            return False
        return info is None or (or_queued and info.queued)

    def cancel(self, timeout_s: float) -> Outcome:
        """Ends the job, and tells how the run ended: a queued one has nobody else to say so.

        Raises DeadlineError when the job does not end.
        """
        deadline = Deadline.after(SystemClock(), timeout_s, f"job {self.job_id} to end")
        noted = _noted_as(self.run, self.job_id)
        self.commands.cancel((noted.array_task if noted is not None else "") or self.job_id)
        poll_until(self.is_over, deadline, JOB_POLL_S)
        if (outcome := self.run.outcome()) is not None:
            return outcome
        step = self._steps_done()
        again = "cancelled in the queue; `liver submit --resume` goes on from its newest checkpoint"
        outcome = Outcome("stopped", again if step else "cancelled before it trained", step)
        outcome.write(self.run.path)
        return outcome

    def _steps_done(self) -> int:
        """By whoever coordinated the run last, also where that was killed, or it begins again."""
        if (last := self.run.last_outcome()) is not None:
            return last.step
        journal = self.run.path / JOURNAL_FILE
        with suppress(ConfigError):  # there is none yet, or it is damaged
            if (end := last_end(journal)) is not None and end["step"]:  # else it knew of none
                return int(end["step"])
        return steps_done(journal)


def own_job(run: RunDirectory, info: JobInfo | None) -> JobInfo | None:
    """What Slurm says of the run's job id; None where another job has it by now, as its name
    shows."""
    if info is None:
        return None
    noted = _noted_as(run, info.job_id)
    name = run.job_name() or (noted.job_name if noted is not None else "")
    return info if name in ("", info.name) else None


def _noted_as(run: RunDirectory, job_id: str) -> OwnJob | None:
    """What job `job_id` noted of itself in a run's directory; None where another one did last."""
    noted = OwnJob.noted(run.path)
    return noted if noted is not None and noted.job_id == job_id else None


def job_of(run: RunDirectory) -> RunJob | None:
    """None for a local run (see `noted_job`), and before it is known which job the run is.

    One question to Slurm, without patience: somebody waits for the answer.
    """
    config, job_id = run.config(), run.job_id()
    if config.cluster.kind != "slurm" or job_id is None:
        return None
    return RunJob(run, job_id, SlurmCommands(config.cluster.slurm.command_s, unreachable_s=0.0))


def noted_job(run: RunDirectory) -> RunJob | None:
    """The job in which `liver run` last coordinated a local run: while it is queued it is to go on
    with the run. What it does once it runs need not be that.

    None where there is none, the run was submitted since, or Slurm's commands are not here.
    """
    job_id = noted_job_id(run)
    command_s = run.config().cluster.slurm.command_s
    return RunJob(run, job_id, SlurmCommands(command_s, unreachable_s=0.0)) if job_id else None


def noted_job_id(run: RunDirectory) -> str:
    """That of `noted_job`; empty without one."""
    noted = OwnJob.noted(run.path) if run.job_id() is None and which("squeue") else None
    return noted.job_id if noted is not None else ""


def step_text(config: RunConfig, job_id: str) -> str:
    """The `srun` that begins a step in a run's job from outside of it. In a job of several
    components Slurm begins none unless it is told in which."""
    several = config.cluster.kind == "slurm" and len(config.cluster.slurm.components) > 1
    return f"srun --jobid={job_id} {'--het-group=0 ' if several else ''}--overlap"


def gone(run: RunDirectory, job: RunJob | None) -> LiverError:
    what = "it" if job is None else f"its job {job.job_id}"
    return LiverError(f"run {run}: {what} is over and {left_text(run)}; {run.where_logs_are()}")


def left_text(run: RunDirectory) -> str:
    """How a run ended whose job is over without an outcome of the run."""
    if (run.path / AGAIN_FILE).exists():
        try:
            with file_lock(run.resume_lock_path, limit_s=0.0):
                pass
        except DeadlineError:
            return "it is being resumed just now"
    last = run.last_outcome()
    if last is None or last.state != REQUEUE:
        return "left no outcome"
    return f"was to be queued again ({last}); `liver submit --resume` goes on"


def check_over(run: RunDirectory) -> None:
    """Raises ConfigError for a run that is not over, or may not be: its job waits or runs, or is
    another cluster's, or a process of it lives. SlurmError where the controller does not answer.
    """
    job, address = job_of(run), run.coordinator()
    asked = job or noted_job(run)
    info = asked.find() if asked is not None else None
    if info is not None:
        starts = address is None and run.outcome() is None
        if job is not None or info.queued or starts:
            raise ConfigError(f"run {run} is not over: job {info.job_id} is {info.state}")
    if job is not None:
        return
    if address is not None and not address.is_here:
        raise ConfigError(
            f"run {run} may not be over: its coordinator was process {address.pid} on "
            f"{address.hostname}, which is where it can be resumed"
        )
    living = run.local_job() or run.coordinators_process()
    if living:
        raise ConfigError(f"run {run} is not over: process {living} lives")
