"""A run's directory: what lies where, and what it says of the run."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import write_whole
from liver_hpc.run.outcome import COORDINATOR_FILE, OUTCOME_FILE, Outcome
from liver_hpc.run.secret import create_secret

LATEST = "latest"
REQUEUE = "requeue"
"""State of an outcome after which the run goes on in another job."""

Kind = TypeVar("Kind")


class CoordinatorAddress(BaseModel):
    """coordinator.json: where the coordinator listens; its process id, on the host `hostname`."""

    model_config = ConfigDict(frozen=True)

    host: str
    port: int
    pid: int
    hostname: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its process id is one of this machine."""
        return self.hostname in ("", socket.gethostname())


def outcome_text(outcome: Outcome) -> str:
    """`stopped at step 12: asked to`."""
    text = f"{outcome.state} at step {outcome.step}"
    return f"{text}: {outcome.reason}" if outcome.reason else text


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and its small files read."""

    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / "run.yaml"

    @property
    def secret_path(self) -> Path:
        return self.path / "secret"

    @property
    def jobs_path(self) -> Path:
        """What submitit writes: the pickled call, the coordinator's output, its result."""
        return self.path / "submitit"

    @property
    def job_id_path(self) -> Path:
        return self.jobs_path / "job_id"

    def __str__(self) -> str:
        return (
            os.path.relpath(self.path) if self.path.is_relative_to(Path.cwd()) else str(self.path)
        )

    def config(self) -> RunConfig:
        return load_run(self.config_path)

    def coordinator(self) -> CoordinatorAddress | None:
        """Where the coordinator listens; None before it does."""
        return _read(self.path / COORDINATOR_FILE, CoordinatorAddress)

    def outcome(self) -> Outcome | None:
        """How the run ended; None while it runs or waits for another job to go on in, and when
        its coordinator was killed."""
        return None if self.goes_on() else self.last_outcome()

    def last_outcome(self) -> Outcome | None:
        """How the run's last coordinator ended."""
        return _read(self.path / OUTCOME_FILE, Outcome)

    def goes_on(self) -> bool:
        """Whether a coordinator has ended for the run to go on when its job is queued again."""
        last = self.last_outcome()
        if last is None or last.state != REQUEUE:
            return False
        return self.config().cluster.slurm.requeue

    def job_id(self) -> str | None:
        """Slurm's job id; a process id on the local cluster. None before the launch."""
        try:
            return self.job_id_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def note_job_id(self, job_id: str) -> None:
        write_whole(self.job_id_path, job_id)

    def where_logs_are(self) -> str:
        return f"its logs are {self}/logs/*.log and {self}/submitit/*"


def create_run_directory(config: RunConfig, name: str | None = None) -> RunDirectory:
    """Makes `<runs_directory>/<name>` (mode 0700) with run.yaml and secret; `name` is
    `<config.name>-<date>-<time>` unless given. Raises ConfigError where that cannot be done."""
    runs = config.runs_directory
    stem = name or f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(_make_new(runs, stem))
        run.jobs_path.mkdir()
        create_secret(run.secret_path)
        # Last: a directory with a run file is a whole one.
        write_whole(run.config_path, dump_run(config))
    except OSError as error:
        raise ConfigError(
            f"runs_directory: cannot make a run in {runs}: {error.strerror}"
        ) from error
    return run


def point_latest(run: RunDirectory) -> None:
    """`latest` beside the run becomes a link to it; it never dangles and is never missing in
    between: a new link takes its place."""
    runs = run.path.parent
    link = runs / f".{LATEST}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(run.path.name, target_is_directory=True)
    os.replace(link, runs / LATEST)


def find_run(text: str, runs_directory: Path) -> RunDirectory:
    """The run that a command names: a directory, a name under `runs_directory`, or `latest`.

    Raises ConfigError when there is none.
    """
    path = runs_directory / text if text == LATEST else Path(text)
    if not path.is_dir() and (runs_directory / text).is_dir():
        path = runs_directory / text
    try:
        resolved = path.resolve(strict=True)
        is_run = (resolved / "run.yaml").is_file()
    except FileNotFoundError:
        if text == LATEST:
            raise ConfigError(f"there is no run under {runs_directory} yet") from None
        raise ConfigError(
            f"there is no run {text}: neither a directory, nor a name under {runs_directory}"
        ) from None
    except OSError as error:
        raise ConfigError(f"run {text}: {error.strerror}") from error
    if not is_run:
        raise ConfigError(f"{path} is not a run directory: it has no run.yaml")
    return RunDirectory(resolved)


def process_lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that only waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _make_new(runs: Path, stem: str) -> Path:
    """A directory that did not exist; a second run in the same second gets a number."""
    number = 1
    while True:
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return path


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}; the run belongs to somebody else") from None
    except ValidationError as error:
        raise LiverError(f"{path} is damaged: {error.errors()[0]['msg']}") from error
