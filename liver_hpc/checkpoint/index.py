"""A checkpoint's files: what they are called, and checkpoint.json, which makes them one.

<directory>/iter_0000123/                  a checkpoint in Megatron's format (torch_dist/files.py)
<directory>/iter_0000123/checkpoint.json   this index, written last
<directory>/iter_0000123/__0_0.distcp      what rank 0 of the saved layout wrote
<directory>/.step-00000130-g4.partial/     being written in generation 4, or of a killed run
<directory>/.step-00000100-g4.removed/     an old one, while it is being removed
<directory>/damaged-iter_0000125/          set aside by a run that went on from an earlier one
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from liver_hpc.config.megatron_checkpoint import (
    COMMON_FILE,
    FORMAT_FILE,
    METADATA_FILE,
    TRACKER_FILE,
    iteration_path,
)
from liver_hpc.errors import CheckpointError, CheckpointOfAnotherRelease, CheckpointUnread
from liver_hpc.host.files import write_whole
from liver_hpc.layout.tensors import ModelSpec, Role
from liver_hpc.protocol.messages import ClassDigest, ScalarState, WireRankMap

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT_VERSION = 3
INDEX_FILE = "checkpoint.json"
FURTHER_FILES = (METADATA_FILE, COMMON_FILE, FORMAT_FILE)
"""What is in a checkpoint beside its ranks' files and the index."""
_COMPLETE = re.compile(r"^iter_(\d{7,})$")
_PARTIAL = re.compile(r"^\.step-(\d{8,})-g(\d+)\.(partial|replaced|removed)$")
_READ_BYTES = 4 * 2**20


def part_key(generation: int, step: int, rank: int) -> str:
    """Under which rank 0 is told what has become of another rank's file: see `part_word`."""
    return f"g{generation}/checkpoint/{step}/{rank}"


def part_word(problem: str) -> str:
    """problem: why it will not come; empty once it is on the disk. Stores take no empty value."""
    return f"{problem}\n"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Frozen):
    """One rank's file. checksum: CRC-32 of its bytes, 8 hex digits."""

    file: str
    num_bytes: int
    checksum: str


class SavedTensor(_Frozen):
    """A tensor of the model, as all layouts know it."""

    name: str
    shape: tuple[int, ...]
    role: Role


class SavedModel(_Frozen):
    """What a model must have in common with the one that was saved."""

    parameter_bytes: int
    tensors: tuple[SavedTensor, ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> SavedModel:
        tensors = tuple(SavedTensor(name=t.name, shape=t.shape, role=t.role) for t in spec.tensors)
        return cls(parameter_bytes=spec.parameter_bytes, tensors=tensors)

    def difference(self, wanted: SavedModel) -> str:
        """How the run's model differs from this saved one; empty when it does not."""
        if self.parameter_bytes != wanted.parameter_bytes:
            return (
                f"its parameters have {self.parameter_bytes} bytes, "
                f"those of the run's model {wanted.parameter_bytes}"
            )
        saved = {tensor.name: tensor for tensor in self.tensors}
        for tensor in wanted.tensors:
            mine = saved.pop(tensor.name, None)
            if mine is None:
                return f"it lacks {tensor.name!r} of the run's model"
            for is_there, is_wanted in ((mine.shape, tensor.shape), (mine.role, tensor.role)):
                if is_there != is_wanted:
                    return f"{tensor.name!r} is {is_there} in it, {is_wanted} in the run's model"
        return f"it holds {next(iter(saved))!r}, which the run's model lacks" if saved else ""


class CheckpointIndex(_Frozen):
    """checkpoint.json: one complete checkpoint.

    run_directory: of the run that wrote it. generation: of the world that was saved. parts,
    digests: in the order of the rank map's ranks; digests are of all that a rank held, whether or
    not it was the one to write it. further: files of the checkpoint that are of no rank. is_finite:
    whether loss and gradients of the last step that was known then were numbers.
    """

    format_version: int
    run: str
    run_directory: str
    saved_s: float
    generation: int
    scalars: ScalarState
    rank_map: WireRankMap
    parts: tuple[Part, ...]
    further: tuple[Part, ...]
    digests: tuple[tuple[ClassDigest, ...], ...]
    model: SavedModel
    versions: dict[str, str]
    is_finite: bool


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the directory that it lies in."""

    path: Path
    index: CheckpointIndex


def partial_path(directory: Path, step: int, generation: int) -> Path:
    """Where a world writes: another one that comes to the same step writes elsewhere, also while
    somebody who was given up as lost still writes here."""
    return directory / f".step-{step:08d}-g{generation}.partial"


def part_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def complete_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything under `directory` that has an index, the oldest step first."""
    return sorted(
        (step, path)
        for path in _entries(directory)
        if (step := named_step(path)) is not None and has_index(path)
    )


def named_step(path: Path) -> int | None:
    """Of which step a complete checkpoint is, by its name; None for what is not called as one."""
    match = _COMPLETE.match(path.name)
    return None if match is None else int(match[1])


def has_index(path: Path) -> bool:
    """Whether there is an index, of what lies there: a job of Megatron's leaves it where it is as
    it saves another checkpoint there."""
    try:  # not `is_file`, which from Python 3.14 on takes what cannot be read for nothing
        (path / INDEX_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not is_saved_over(path)


def is_saved_over(path: Path) -> bool:
    """Whether the table of contents is newer than the index, and another one than it says."""
    index, table = path / INDEX_FILE, path / METADATA_FILE
    try:
        if table.stat().st_mtime_ns <= index.stat().st_mtime_ns:
            return False
        return written_part(table) not in read_index(path).further
    except (OSError, CheckpointError):  # it is damaged, or not there
        return False


def newest_step(directory: Path) -> int:
    """The step of the newest complete checkpoint under `directory`, damaged or not; -1 where there
    is none."""
    return max((step for step, _ in complete_checkpoints(directory)), default=-1)


def set_aside(path: Path) -> Path:
    """Gives a damaged checkpoint a name under which it is no checkpoint any more; that name."""
    number, aside = 1, path.with_name(f"damaged-{path.name}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    return path.rename(aside)


def remains(directory: Path) -> list[tuple[int, int, Path]]:
    """(step, generation, path) of what was being written, or to be removed, when a coordinator was
    killed."""
    entries = ((_PARTIAL.match(path.name), path) for path in _entries(directory))
    return [(int(match[1]), int(match[2]), path) for match, path in entries if match is not None]


def put_back(directory: Path, of: Callable[[int], bool] = lambda _generation: True) -> None:
    """Gives those that were to be replaced their names again, where nothing came in their place.
    of: whether by a world of this generation."""
    for step, generation, path in remains(directory):
        final = iteration_path(directory, step)
        if path.suffix == ".replaced" and of(generation) and not final.exists():
            path.rename(final)


def _entries(directory: Path) -> list[Path]:
    try:
        return [*directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_index(path: Path) -> CheckpointIndex:
    """The index of the checkpoint in `path`; CheckpointError where there is none, or it is damaged,
    CheckpointUnread where that is not known, CheckpointOfAnotherRelease."""
    file, data = path / INDEX_FILE, None
    try:
        data = json.loads(read_twice(file.read_bytes))
        version = data.get("format_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version != FORMAT_VERSION:
            wanted = f"format {version}, wanted {FORMAT_VERSION}"
            raise CheckpointOfAnotherRelease(f"{file} is {_by(data)}: {wanted}")
        return CheckpointIndex.model_validate(data)
    except OSError as error:
        kind = CheckpointError if isinstance(error, FileNotFoundError) else CheckpointUnread
        raise kind(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if all(each["type"] == "extra_forbidden" for each in error.errors()):
            raise CheckpointOfAnotherRelease(f"{file} is {_by(data)}: it has {where}") from error
        raise CheckpointError(f"{file} is damaged: {where}: {first['msg']}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _by(index: Any) -> str:
    versions = index.get("versions")
    release = versions.get("liver-hpc") if isinstance(versions, dict) else None
    return f"of another release, liver-hpc {release}"


def read_twice(read: Callable[[], T]) -> T:
    """What `read` gives, if only at the second time: a file system may fail for a moment. Raises
    OSError."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError as error:
        log.warning("%s; it is tried again", error)
        return read()


def write_index(path: Path, index: CheckpointIndex) -> None:
    """Puts the index into `path`, whole or not at all, and on the disk with its directory."""
    text = index.model_dump_json(indent=1) + "\n"
    write_whole(path / INDEX_FILE, text, sync=True)


def written_part(path: Path) -> Part:
    """A file as it is now; raises OSError."""
    return Part(file=path.name, num_bytes=path.stat().st_size, checksum=checksum(path))


def track(directory: Path, step: int) -> None:
    """Makes the checkpoint of a step the one that a job of Megatron's loads. Raises OSError."""
    write_whole(directory / TRACKER_FILE, str(step), sync=True)


def checksum(path: Path) -> str:
    """CRC-32 of a file's bytes, 8 hex digits."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"
