"""`liver run`: the coordinator in this process, for a batch script of one's own.

In a Slurm job that begins again the run goes on: its directory is named after the job, and the run
file is the one that the job began with.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.cli.submission import checked_run, with_prepared_data
from liver_hpc.cluster.slurm.run_job import requeue
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig, SlurmSection
from liver_hpc.coordinator.hosting import HostedCoordinator, checkpoint_in_time
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.run.directory import RunDirectory, create_run_directory, point_latest
from liver_hpc.run.outcome import Outcome

FINISHED = "finished"
"""State of an outcome after which there is nothing to go on with."""
_END_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_here(
    config_path: Path,
    overrides: Sequence[str],
    tell: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> tuple[RunDirectory, Outcome | None]:
    """Lives a run to its end, or to the end of this job; its directory, and how it ended.

    No outcome: the run goes on when the job, which has been queued again, starts again. SIGUSR1
    and SIGUSR2 say that the job's end is near, SIGTERM and SIGINT stop the run. `tell` hears the
    run directory as soon as there is one. Raises ConfigError before anything is started.
    """
    early = _Signals()
    with early.heard():
        job_id = environment.get("SLURM_JOB_ID", "")
        run = _open_run(load_run(config_path, overrides), job_id, tell)
        config, last = run.config(), run.last_outcome()
        if last is not None and last.state == FINISHED:
            return run, last
        hosted = HostedCoordinator(str(run.path))
        if job_id:
            slurm = config.cluster.slurm
            early.pass_on(hosted, lambda number: _end_near(hosted, slurm, job_id))
        else:  # there is nobody to begin the run again
            early.pass_on(hosted, lambda number: hosted.stop(signal.Signals(number).name))
        try:
            hosted.start()
            hosted.wait()
        except _TimeIsUp:
            return run, None if config.cluster.slurm.requeue else run.outcome()
        if run.goes_on():
            requeue(config.cluster.slurm, job_id)
            return run, None
    outcome = run.last_outcome()
    if outcome is None:
        raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
    return run, outcome


class _TimeIsUp(Exception):
    """The window was over before the state was on disk; the job begins again where it may."""


def _end_near(hosted: HostedCoordinator, slurm: SlurmSection, job_id: str) -> None:
    """In a signal handler. Raises _TimeIsUp where nobody is left to wait for."""
    checkpoint_in_time(hosted, slurm, job_id)
    if hosted.started and not hosted.wait(0.0):
        if slurm.requeue:
            requeue(slurm, job_id)
        else:
            hosted.give_up()
        raise _TimeIsUp


def _open_run(config: RunConfig, job_id: str, tell: Callable[[str], None]) -> RunDirectory:
    """The directory of this job's run, made where it is not there yet."""
    if config.cluster.kind == "slurm" and not job_id:
        raise ConfigError(
            "cluster slurm: `liver run` belongs into a Slurm job (SLURM_JOB_ID is not set); "
            "`liver submit` makes one"
        )
    name = f"{config.name}-{job_id}" if job_id else None
    if name is not None:
        known = RunDirectory(config.runs_directory.expanduser().absolute() / name)
        if known.config_path.is_file():
            tell(f"run {known} goes on")
            return known
    kind = config.cluster.kind
    if kind == "auto":
        kind = "slurm" if job_id and config.cluster.slurm.components else "local"
    config, _ = checked_run(config, kind)
    run = create_run_directory(with_prepared_data(config), name)
    if kind == "slurm":
        run.note_job_id(job_id)
    point_latest(run)
    tell(f"run {run}")
    return run


class _Signals:
    """What signals say, kept until there is somebody to hear it."""

    def __init__(self) -> None:
        self._hosted: HostedCoordinator | None = None
        self._end_near: Callable[[int], None] = lambda number: None
        self._said: list[int] = []

    @contextmanager
    def heard(self) -> Iterator[None]:
        numbers = (*_END_SIGNALS, *_STOP_SIGNALS)
        previous = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def pass_on(self, hosted: HostedCoordinator, end_near: Callable[[int], None]) -> None:
        """From now on `hosted` is told, also of what was said before."""
        self._hosted, self._end_near = hosted, end_near
        for number in self._said:
            self._hear(number, None)

    def _hear(self, number: int, frame: object) -> None:
        if self._hosted is None:
            self._said.append(number)
            if number in _STOP_SIGNALS:
                raise KeyboardInterrupt
        elif number in _END_SIGNALS:
            self._end_near(number)
        else:
            self._hosted.stop(signal.Signals(number).name)
