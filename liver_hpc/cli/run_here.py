"""`liver run`: the coordinator in this process, for a batch script of one's own.

In a Slurm job that begins again the run goes on: its directory is named after the job, and the run
file is the one that the job began with.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from liver_hpc.cli.submission import checked_run, note_latest, with_prepared_data
from liver_hpc.cluster.slurm.run_job import OwnJob
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig, SlurmSection
from liver_hpc.coordinator.hosting import HostedCoordinator, checkpoint_in_time, requeue
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import whose
from liver_hpc.run.directory import RunDirectory, create_run_directory
from liver_hpc.run.outcome import Outcome

_END_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_here(
    config_path: Path,
    overrides: Sequence[str],
    tell: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> tuple[RunDirectory, Outcome | None]:
    """Runs to the end of the run, or of this job; the run's directory, and how it ended.

    No outcome: the run goes on when the job, which has been queued again, starts again. SIGUSR1
    and SIGUSR2 say that the job's end is near, SIGTERM and SIGINT stop the run. `tell` hears the
    run directory as soon as there is one. Raises ConfigError before anything is started.
    """
    job = OwnJob.of(environment)
    signals = _Signals(job)
    with signals.heard():
        run = _open_run(load_run(config_path, overrides), job, tell)
        config, last = run.config(), run.last_outcome()
        if last is not None and last.state == "finished":
            return run, last
        hosted = HostedCoordinator(run.path)
        signals.pass_on(hosted, config.cluster.slurm)
        try:
            hosted.start()
            hosted.wait()
        except _TimeIsUp:
            return run, hosted.outcome
        if job is not None and hosted.outcome is not None and hosted.outcome.goes_on(config):
            requeue(config.cluster.slurm, job.job_id)
            return run, None
    if hosted.outcome is None:
        raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
    return run, hosted.outcome


def _open_run(config: RunConfig, job: OwnJob | None, tell: Callable[[str], None]) -> RunDirectory:
    """The directory of this job's run, made where it is not there yet."""
    kind = config.cluster.kind
    if kind == "slurm" and job is None:
        raise ConfigError(
            "cluster slurm: `liver run` belongs into a Slurm job (SLURM_JOB_ID is not set); "
            "`liver submit` makes one"
        )
    name = f"{config.name}-{job.job_id}" if job is not None else None
    if job is not None and (known := _known_run(config, job)) is not None:
        tell(f"run {known} goes on")
        with contextlib.suppress(OSError):  # a full disk: an earlier start stays noted
            job.note(known.path)
        return known
    if kind == "auto":
        kind = "slurm" if job is not None and config.cluster.slurm.components else "local"
    config, _ = checked_run(config, kind)
    run = create_run_directory(with_prepared_data(config), name)
    if job is not None:
        job.note(run.path)
        if kind == "slurm":
            run.note_job_id(job.job_id)
    note_latest(run)
    tell(f"run {run}")
    return run


def _known_run(config: RunConfig, job: OwnJob) -> RunDirectory | None:
    """The directory that this job made when it started before; it has a number behind its name
    where another job of the same id came first."""
    runs = config.runs_directory.expanduser().absolute()
    found = [
        path
        for path in runs.glob(f"{config.name}-{job.job_id}*")
        if not path.is_symlink() and not whose(path.lstat()) and (path / "run.yaml").is_file()
    ]
    mine = [path for path in found if job.made(path)]
    return RunDirectory(max(mine, key=OwnJob.noted_s)) if mine else None


class _TimeIsUp(Exception):
    """The window was over before the state was on disk; the job begins again where it may."""


class _Signals:
    """What signals say, kept until there is a coordinator to hear it."""

    def __init__(self, job: OwnJob | None) -> None:
        self._job = job
        self._hosted: HostedCoordinator | None = None
        self._slurm = SlurmSection()
        self._said: list[int] = []

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        numbers = (*_END_SIGNALS, *_STOP_SIGNALS)
        previous = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def pass_on(self, hosted: HostedCoordinator, slurm: SlurmSection) -> None:
        """From now on `hosted` is told, also of what was said before."""
        self._hosted, self._slurm = hosted, slurm
        for number in self._said:
            self._hear(number, None)

    def _hear(self, number: int, frame: object) -> None:
        if self._hosted is None:
            self._said.append(number)
            if number in _STOP_SIGNALS:
                raise KeyboardInterrupt
        elif number in _END_SIGNALS and self._job is not None:
            self._end_near(self._hosted, self._job.job_id)
        else:  # outside of a job nobody begins the run again
            self._hosted.stop(signal.Signals(number).name)

    def _end_near(self, hosted: HostedCoordinator, job_id: str) -> None:
        """Raises _TimeIsUp where nobody is left to wait for."""
        checkpoint_in_time(hosted, self._slurm, job_id)
        if hosted.started and not hosted.wait(0.0):
            if self._slurm.requeue:
                requeue(self._slurm, job_id)
            else:
                hosted.give_up()
            raise _TimeIsUp
