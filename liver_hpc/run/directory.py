"""A run's directory: what lies where, and what it says of the run."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from liver_hpc.clock import started_ticks
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.megatron_checkpoint import OWNER_FILE, is_taken
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import look_anew, make_directory, whose, write_whole
from liver_hpc.run.outcome import (
    COORDINATOR_FILE,
    OUTCOME_FILE,
    REQUEUE,
    WORLD_FILE,
    Outcome,
    WorldNote,
)
from liver_hpc.run.secret import create_secret

_CLOCKS_S = 60.0
"""How far the clock of a file system may be behind."""
LATEST = "latest"

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class CoordinatorAddress:
    """coordinator.json: where the coordinator listens; its process id, on the host `hostname`.
    epoch: the run's coordinators are numbered; the highest is the one that counts. started_ticks:
    its process's (`clock.py`); 0 where that is not known."""

    host: str
    port: int
    pid: int
    hostname: str = ""
    epoch: int = 0
    started_ticks: int = 0

    @property
    def is_here(self) -> bool:
        """Whether its process id is one of this machine."""
        return self.hostname in ("", socket.gethostname())


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
    def checkpoints_path(self) -> Path:
        """A directory, or a link to one where the run file wants checkpoints elsewhere."""
        return self.path / "checkpoints"

    @property
    def checkpoints_place(self) -> Path:
        """That directory itself, which is still there where somebody removes the run's."""
        link = self.checkpoints_path
        return Path(os.readlink(link)) if link.is_symlink() else link

    @property
    def jobs_path(self) -> Path:
        """What submitit writes: the pickled call, the coordinator's output, its result."""
        return self.path / "submitit"

    @property
    def job_id_path(self) -> Path:
        return self.jobs_path / "job_id"

    @property
    def resume_lock_path(self) -> Path:
        """Locked by who launches the run again."""
        return self.jobs_path / "resume.lock"

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
        last = self.last_outcome()
        if last is None or last.state != REQUEUE:
            return last
        return None if last.goes_on(self.config()) else last

    def last_outcome(self) -> Outcome | None:
        """How the run's last coordinator ended."""
        return _read(self.path / OUTCOME_FILE, Outcome)

    def coordinators_process(self) -> int | None:
        """The coordinator's process, where it is one of this machine and lives."""
        address = self.coordinator()
        if address is None or not address.is_here:
            return None
        noted = address.started_ticks or self.path / COORDINATOR_FILE
        return address.pid if process_lives(address.pid, noted) else None

    def local_job(self) -> int | None:
        """The process that a job of the local cluster is, where it lives."""
        pid = int(self.job_id() or 0)
        return pid if pid and process_lives(pid, self.job_id_path) else None

    def world(self) -> WorldNote | None:
        """The world that trains, or trained last; None before the first of a start."""
        return _read(self.path / WORLD_FILE, WorldNote)

    def job_id(self) -> str | None:
        """Slurm's job id; a process id on the local cluster. None before the launch."""
        return self._job()[0] or None

    def job_name(self) -> str:
        """That of the job in Slurm; empty where nobody noted it."""
        return self._job()[1]

    def _job(self) -> tuple[str, str]:
        try:
            text = self.job_id_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "", ""
        job_id, _, name = text.partition(" ")
        if not job_id.isdecimal():
            raise LiverError(f"{self.job_id_path} is damaged: wanted a job id, got {text!r}")
        return job_id, name

    def note_job_id(self, job_id: str, name: str = "") -> None:
        """name: of a job in Slurm, where an id alone is not enough: another job may have it once
        this one is over. One that no line of text can hold is left out."""
        write_whole(self.job_id_path, f"{job_id} {name}".strip() if name.isprintable() else job_id)

    def where_logs_are(self) -> str:
        return f"its logs are {self}/logs/*.log and {self}/submitit/*"


# ---- made


def create_run_directory(config: RunConfig, name: str | None = None) -> RunDirectory:
    """Makes `<runs_directory>/<name>` (mode 0700) with run.yaml and secret, and a directory for
    checkpoints where the run file wants them elsewhere; `name` is `<config.name>-<date>-<time>`
    unless given. Raises ConfigError where that cannot be done."""
    runs = config.runs_directory
    stem = name or f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        make_directory(runs)
        run = RunDirectory(_make_new(runs, stem))
        run.jobs_path.mkdir()
        create_secret(run.secret_path)
        if config.checkpoint.directory is not None:
            _link_checkpoints(run, config)
        # Last: a directory with a run file is a whole one.
        write_whole(run.config_path, dump_run(config))
    except OSError as error:
        raise ConfigError(
            f"runs_directory: cannot make a run in {runs}: {error.strerror}"
        ) from error
    return run


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


def _link_checkpoints(run: RunDirectory, config: RunConfig) -> None:
    """The run directory has its name; they lie in the directory itself, as Megatron's --save means,
    which may be there."""
    assert config.checkpoint.directory is not None
    path = config.checkpoint.directory.expanduser().absolute()
    _check_own(path)
    run.checkpoints_path.symlink_to(path, target_is_directory=True)
    if not (config.checkpoint.goes_on_from_others and _owner_of(path)):
        _take(path, run)


CheckOver = Callable[[RunDirectory], None]
"""Raises ConfigError for a run that is not over (`cluster/slurm/run_job.py`)."""


def check_free(config: RunConfig, check_over: CheckOver) -> None:
    """Raises ConfigError where another run, which is not over, has taken the directory that a new
    one wants its checkpoints in: they would go on from, and remove, each other's. A run that begins
    with what lies there may wait in the queue behind the other one; its claim comes later."""
    directory = config.checkpoint.directory
    if directory is not None and not config.checkpoint.goes_on_from_others:
        _check_free(directory.expanduser(), check_over)


def claim_checkpoints(run: RunDirectory, config: RunConfig, check_over: CheckOver) -> Path:
    """Where the run's checkpoints lie, looked at again before a coordinator reads or writes there.

    Elsewhere, it must be a directory of this user, or of his a link to one, of no other run that is
    not over; from now on it is this run's. So is the run's own that another one has taken. Raises
    ConfigError when it is not.
    """
    link, path = run.checkpoints_path, run.checkpoints_path
    if config.checkpoint.directory is None:
        if not is_taken(link):
            return link
    elif link.is_symlink():
        path = Path(os.readlink(link))
        _check_own(path)
    else:
        return link
    _check_free(path, check_over, run)
    _take(path, run)
    return link


def _check_free(path: Path, check_over: CheckOver, run: RunDirectory | None = None) -> None:
    owner = _owner_of(path)
    if owner is None or (run is not None and owner.path.samefile(run.path)):
        return
    try:
        check_over(owner)
    except ConfigError as error:
        says = f", as {path / OWNER_FILE} says" if is_taken(path) else ""
        raise ConfigError(f"checkpoint.directory: {path} is another run's{says}: {error}") from None


def _owner_of(path: Path) -> RunDirectory | None:
    """The run that took a directory last, else the one in whose directory it lies; None where there
    is none, or it is gone."""
    with suppress(OSError, UnicodeDecodeError):
        owner = RunDirectory(Path((path / OWNER_FILE).read_text(encoding="utf-8")))
        return owner if owner.config_path.is_file() else None
    around = RunDirectory(path.resolve().parent)
    return around if around.config_path.is_file() and around.secret_path.is_file() else None


def _take(path: Path, run: RunDirectory) -> None:
    owner = _owner_of(path)
    if owner is not None and owner.path.samefile(run.path):
        return  # a disk that is full by now keeps nobody from going on
    try:
        write_whole(path / OWNER_FILE, str(run.path.absolute()))
    except OSError as error:
        raise ConfigError(f"checkpoint.directory: {path}: {error.strerror}") from error


def _check_own(path: Path) -> None:
    try:
        make_directory(path, mode=0o700)  # where a scratch has been cleaned
        for status in (path.lstat(), path.stat()):
            if whose(status):
                raise ConfigError(f"checkpoint.directory: {path} {whose(status)}")
    except OSError as error:
        raise ConfigError(f"checkpoint.directory: {path}: {error.strerror}") from error


def point_latest(run: RunDirectory) -> str:
    """`latest` beside the run becomes a link to it; it never dangles and is never missing in
    between: a new link takes its place. Returns why it could not, else nothing."""
    runs = run.path.parent
    link = runs / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        link.symlink_to(run.path.name, target_is_directory=True)
        link.replace(runs / LATEST)
    except OSError as error:
        link.unlink(missing_ok=True)
        return f"{runs / LATEST} does not name this run: {error.strerror}"
    return ""


# ---- found


def find_run(text: str, runs_directory: Path) -> RunDirectory:
    """The run that a command names: a directory, a name under `runs_directory`, or `latest`.

    Raises ConfigError when there is none, and when it, or the link to it, belongs to another user:
    what lies there would be loaded.
    """
    path = runs_directory / text if text == LATEST else Path(text)
    try:
        if not path.is_dir() and (runs_directory / text).is_dir():
            path = runs_directory / text
        resolved = Path(os.path.realpath(path, strict=True))
        is_run = (resolved / "run.yaml").is_file()
        foreign = [f"{each} {text}" for each in (path, resolved) if (text := whose(each.lstat()))]
    except FileNotFoundError:
        if path.is_symlink():
            gone = os.path.basename(os.readlink(path))
            raise ConfigError(
                f"{path} names {gone}, which is gone; `liver list` says which runs there are"
            ) from None
        if text == LATEST:
            raise ConfigError(
                f"there is no run under {runs_directory.absolute()} yet; --runs-directory names "
                "another directory of runs"
            ) from None
        raise ConfigError(
            f"there is no run {text}: neither a directory, nor a name under {runs_directory}"
        ) from None
    except OSError as error:
        raise ConfigError(f"run {text}: {error.strerror}") from error
    if not is_run:
        raise ConfigError(f"{path} is not a run directory: it has no run.yaml")
    if foreign:
        raise ConfigError(
            f"{foreign[-1]}; give the command as that user, or name a run of your own"
        )
    return RunDirectory(resolved)


def runs_in(runs_directory: Path) -> tuple[list[RunDirectory], int]:
    """All runs of this user there, and how many directories are another user's."""
    found, foreign = [], 0
    try:
        entries = [*os.scandir(runs_directory)]
    except FileNotFoundError:
        entries = []
    except OSError as error:
        raise ConfigError(f"{runs_directory}: {error.strerror}") from error
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            continue
        if whose(entry.stat(follow_symlinks=False)):
            foreign += 1
        elif os.path.exists(f"{entry.path}/run.yaml"):
            found.append(RunDirectory(Path(entry.path)))
    return found, foreign


def process_lives(pid: int, noted: Path | int | None = None) -> bool:
    """Whether a process of this machine runs; one that only waits to be reaped does not.

    noted: when it was started (`clock.started_ticks`), or the file that names it. One that was
    started at another time, or long after that was written, has the number by chance: the machine,
    or a container, has been started again since.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        began_s = process.create_time()
    except psutil.NoSuchProcess:
        return False
    try:
        if isinstance(noted, int):
            return started_ticks(pid) == noted
        return noted is None or began_s < noted.stat().st_mtime + _CLOCKS_S
    except OSError:
        return True


_adapter = cache(TypeAdapter[Any])
"""Making one takes longer than reading the files of ten runs."""


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]  # mypy takes no generic type for hashable
        found: Kind = adapter.validate_json(_bytes(path))
        return found
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}; the run belongs to somebody else") from None
    except ValidationError as error:
        raise LiverError(f"{path} is damaged: {error.errors()[0]['msg']}") from error


def _bytes(path: Path) -> bytes:
    """Also of a file that another host has written since it was last looked for, or replaces just
    now."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        look_anew(path.parent)
        return path.read_bytes()
