"""A directory of Megatron's checkpoints, as `--save` and `--load` mean it: what needs no torch.

<directory>/latest_checkpointed_iteration.txt    the step of the newest one
<directory>/iter_0000123/                        a checkpoint
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from liver_hpc.errors import CheckpointError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
FORMAT_FILE = "metadata.json"
METADATA_FILE = ".metadata"
OWNER_FILE = ".liver-run"
"""In the directory: the run whose checkpoints these are, where that is not above it."""
COMMON_FILE = "common.pt"
RELEASE = "release"
"""What a tracker file names, and a checkpoint is called, that holds weights alone."""
_WANTED = "wanted a torch_dist checkpoint"


def is_taken(directory: Path) -> bool:
    """Whether a run has taken it that does not lie around it."""
    return (directory / OWNER_FILE).exists()


def iteration_path(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def tracked_step(directory: Path) -> int | None:
    """The step of the checkpoint that a job loads from `directory`; None where there is none.

    Raises CheckpointError for a tracker file that names none.
    """
    tracked = _tracked(directory)
    if tracked == RELEASE:
        raise CheckpointError(
            f"{directory / TRACKER_FILE}: a release checkpoint has no state of the optimizer to go "
            "on from; checkpoint.weights (--finetune) takes its weights"
        )
    return None if tracked is None else int(tracked)


def _tracked(directory: Path) -> str | None:
    """What the tracker file says, digits or RELEASE; None where there is none."""
    file = directory / TRACKER_FILE
    try:
        text = file.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if text != RELEASE and not re.fullmatch(r"\d{1,18}", text):
        raise CheckpointError(f"{file}: wanted a step, got {text[:40]!r}")
    return text


def loaded_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """(step, path) of what a job loads from `directory`; None where there is nothing.

    Raises CheckpointError for one that is not there, or of another format.
    """
    directory = directory.expanduser()
    step = tracked_step(directory)
    if step is None:
        return None
    path = iteration_path(directory, step)
    check_format(path)
    return step, path


def weights_checkpoint(directory: Path) -> Path:
    """Whose weights a new run takes from `directory`: the checkpoint that the tracker file names,
    also a release. Raises CheckpointError where there is none, or one of another format."""
    directory = directory.expanduser()
    tracked = _tracked(directory)
    if tracked is None:
        raise CheckpointError(f"{directory} has no checkpoint: it lacks {TRACKER_FILE}")
    release = tracked == RELEASE
    path = directory / RELEASE if release else iteration_path(directory, int(tracked))
    check_format(path)
    return path


def check_format(path: Path) -> None:
    """Raises CheckpointError where `path` is no torch_dist checkpoint."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if FORMAT_FILE not in names:
        if any(name.startswith("mp_rank_") for name in names):
            found = "of Megatron's legacy format (torch)"
        elif METADATA_FILE in names:
            found = "of the format torch_dcp or fsdp_dtensor"
        else:
            found = f"no checkpoint: it lacks {FORMAT_FILE}"
        raise CheckpointError(f"{path} is {found}; {_WANTED}")
    file = path / FORMAT_FILE
    try:
        about = json.loads(file.read_bytes())
        backend = about["sharded_backend"], about["sharded_backend_version"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error
    if backend != ("torch_dist", 1):
        raise CheckpointError(f"{path} is of the format {backend[0]} {backend[1]}; {_WANTED}")
    # From 0.19 on, what is in no tensor is an object among the others.
    for name in (METADATA_FILE, *([COMMON_FILE] if "common_backend" in about else [])):
        if name not in names:
            raise CheckpointError(f"{path} is incomplete: it lacks {name}")
