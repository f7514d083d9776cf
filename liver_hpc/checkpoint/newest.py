"""Which checkpoint a run goes on from, and whether one is what was written."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from liver_hpc.checkpoint.index import (
    Checkpoint,
    checksum,
    complete_checkpoints,
    has_index,
    named_step,
    read_index,
    read_twice,
)
from liver_hpc.config.megatron_checkpoint import (
    TRACKER_FILE,
    is_taken,
    loaded_checkpoint,
    weights_checkpoint,
)
from liver_hpc.config.schema import CheckpointSection, RunConfig
from liver_hpc.errors import (
    CheckpointError,
    CheckpointOfAnotherRelease,
    CheckpointUnread,
    ConfigError,
)

log = logging.getLogger(__name__)


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The complete checkpoint of the highest step under `directory` that is not damaged; None where
    there is none at all.

    Damaged: the index cannot be read, or parts are missing or not as long as written; the log says
    so. Raises CheckpointError when all are, and for one of another release.
    """
    problems = []
    for _, path in reversed(complete_checkpoints(directory)):
        try:
            return checked(path)
        except CheckpointOfAnotherRelease:
            raise
        except CheckpointError as error:
            problems.append(str(error))
            log.error("%s; the checkpoint before it is tried", error)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}; there is no earlier checkpoint")
    return None


def check_own(newest: Checkpoint | None, run_directory: Path, section: CheckpointSection) -> None:
    """Raises ConfigError where another run, which is still there, has written the newest checkpoint
    of the directory that this one saves into: it has gone on there by other values."""
    if newest is None or section.goes_on_from_others:
        return
    if section.directory is None and not is_taken(newest.path.parent):
        return
    # By the directory's name, as machines may know it by other paths.
    other = Path(newest.index.run_directory)
    if other.name not in ("", run_directory.name) and (other / "run.yaml").is_file():
        raise ConfigError(
            f"checkpoint.directory: the newest checkpoint, {newest.path}, is of another run, "
            f"{other}: resume that one, or submit a new run whose checkpoint.load is this "
            "directory; to go on from this run's own move the newer ones away"
        )


def checked(path: Path) -> Checkpoint:
    """Raises CheckpointError where the index cannot be read, or is of another step than the name
    says, or a file is missing or not as long as written; CheckpointUnread where that is not
    known."""
    index = read_index(path)
    named = named_step(path)
    if named not in (None, index.scalars.step):
        step = index.scalars.step
        raise CheckpointError(f"{path} is the checkpoint of step {step} under another name")
    for part in (*index.parts, *index.further):
        file = path / part.file
        got_bytes = _num_bytes(file)
        if got_bytes != part.num_bytes:
            got = "missing" if got_bytes is None else f"{got_bytes} bytes long"
            raise CheckpointError(f"{file} is {got}, wanted {part.num_bytes} bytes")
    return Checkpoint(path, index)


def _num_bytes(file: Path) -> int | None:
    """None where there is no such file."""
    try:
        found = read_twice(file.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointUnread(f"{file} cannot be read: {error.strerror}") from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_whole(path: Path) -> bool:
    """The same; the log says what is wrong."""
    try:
        checked(path)
    except CheckpointError as error:
        log.error("%s", error)
        return False
    return True


def is_damaged(path: Path) -> bool:
    """Whether `checked` finds a fault, and not only that it cannot tell."""
    try:
        checked(path)
    except CheckpointError as error:
        return not isinstance(error, CheckpointUnread)
    return False


def changed_files(
    checkpoint: Checkpoint, goes_on: Callable[[], bool] = lambda: True
) -> tuple[list[str], list[str]]:
    """Which files are not what was written, and of which that is not known; reads all of them.
    goes_on: asked before each file, whether it is to be read."""
    changed: list[str] = []
    unread: list[str] = []
    for part in (*checkpoint.index.parts, *checkpoint.index.further):
        if not goes_on():
            break
        file = checkpoint.path / part.file
        try:
            got = read_twice(partial(checksum, file))
        except OSError as error:
            of = changed if isinstance(error, FileNotFoundError) else unread
            of.append(f"{file} cannot be read: {error.strerror}")
            continue
        if got != part.checksum:
            wanted = f"checksum {got}, wanted {part.checksum}"
            changed.append(f"{file} has changed on the disk ({wanted})")
    return changed, unread


@dataclass(frozen=True)
class Loaded:
    """A checkpoint of a job of Megatron's, or of another run, which a run begins with. of_run: what
    another run says of it. weights: nothing else of it is taken, and the step is 0."""

    path: Path
    step: int
    of_run: Checkpoint | None = None
    weights: bool = False


def to_load(config: RunConfig, directory: Path, own: Checkpoint | None) -> Loaded | None:
    """What a run begins with by `checkpoint.load`, else by `checkpoint.weights`; None where it goes
    on from its own newest one, or begins with nothing.

    The run's own goes first, but where both are in one directory the newest does. Raises
    CheckpointError for a directory without one, or with one that cannot be loaded.
    """
    found, weights = _to_go_on_from(config, directory, own), config.checkpoint.weights
    if found is not None or own is not None or weights is None:
        return found
    path = weights_checkpoint(weights)
    return Loaded(path, 0, checked(path) if has_index(path) else None, weights=True)


def goes_on_from(config: RunConfig) -> Path | None:
    """The checkpoint with which the run of a run file begins that has `checkpoint.load`, or goes on
    from: of its own where the run file says where these lie. None where there is none, and without
    `checkpoint.load`. Raises as `to_load`."""
    section = config.checkpoint
    if section.load is None:
        return None
    if section.directory is None:
        found = loaded_checkpoint(section.load)
        return None if found is None else found[1]
    directory = section.directory.expanduser()
    own = newest_checkpoint(directory)
    loaded = _to_go_on_from(config, directory, own)
    if loaded is not None:
        return loaded.path
    return None if own is None else own.path


def _to_go_on_from(config: RunConfig, directory: Path, own: Checkpoint | None) -> Loaded | None:
    """By `checkpoint.load`; None too where that is where the run saves, and holds nothing yet."""
    load = config.checkpoint.load
    if load is None:
        return None
    load = load.expanduser()
    same = load.resolve() == directory.resolve()
    if own is not None and not same:
        return None
    try:
        found = loaded_checkpoint(load)
    except CheckpointError as error:
        if own is None:
            raise
        log.warning("checkpoint.load: %s: the run goes on from its own newest one", error)
        return None
    if found is None:
        if not same:
            raise CheckpointError(f"checkpoint.load: {load} has no {TRACKER_FILE}")
        log.info("checkpoint.load: %s has no checkpoint yet; training begins at step 0", load)
        return None
    step, path = found
    is_of_a_run = has_index(path)
    if own is not None and own.index.scalars.step >= step:
        return None
    if is_of_a_run and same:
        return None  # its own, and damaged: it would be `own` else
    return Loaded(path, step, checked(path) if is_of_a_run else None)
