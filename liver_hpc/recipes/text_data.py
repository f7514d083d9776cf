"""Text files -> byte-level tokens -> Megatron's indexed data (`<prefix>.bin` and `<prefix>.idx`).

A token is a byte, 0 to 255; 256 ends a document, and a file is a document. The prefix is named
after the list of files, their sizes and times, so that other text never meets an old index.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from liver_hpc.config.indexed_data import IndexedData, read_indexed_data, write_index
from liver_hpc.config.schema import DataSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.files import file_lock, flush_to_disk

END_OF_DOCUMENT = 256
VOCABULARY = 257
"""Token values: all bytes, and the end of a document."""

STDLIB = "python-stdlib"
_SUFFIXES = ("bin", "idx")
_FORMAT = "1"
"""A part of the name, to be raised when the same text becomes other tokens."""
_STDLIB_WITHOUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True)
class TextFile:
    """One source file; `take_bytes` is less than `num_bytes` where the limit cuts it."""

    path: Path
    num_bytes: int
    modified_ns: int
    take_bytes: int


def text_files(data: DataSection) -> list[TextFile]:
    """The files of `data.text` in order, up to `max_text_bytes`; empty files are left out.

    Raises ConfigError when a pattern matches no file or all files are empty.
    """
    assert data.text is not None, "data.prefix names what has been tokenized"
    paths = _stdlib_paths() if data.text == STDLIB else _matching_paths(data.text)
    files: list[TextFile] = []
    room = data.max_text_bytes
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"data.text: {path} cannot be read: {error.strerror}") from error
        take = min(status.st_size, room)
        if take:
            files.append(TextFile(path, status.st_size, status.st_mtime_ns, take))
            room -= take
    if not files:
        raise ConfigError(f"data.text: all files of {data.text} are empty: {len(paths)} found")
    return files


def _stdlib_paths() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _STDLIB_WITHOUT]
        found.extend(Path(directory, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _matching_paths(patterns: Sequence[str]) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        names = glob.glob(os.path.expanduser(pattern), recursive=True)
        matching = {Path(name) for name in names if os.path.isfile(name)}
        if not matching:
            raise ConfigError(f"data.text: no file matches {pattern!r}")
        found |= matching
    return sorted(found)


def prefix_of(data: DataSection, files: Sequence[TextFile]) -> Path:
    """Where the indexed data of these files lies, or would: the path without `.bin` or `.idx`."""
    hashed = hashlib.sha256(_FORMAT.encode())
    for file in files:
        entry = (str(file.path), file.num_bytes, file.modified_ns, file.take_bytes)
        hashed.update(repr(entry).encode())
    return data.directory / f"text-{hashed.hexdigest()}"


def prepare(data: DataSection) -> IndexedData:
    """Tokenizes `data.text` unless that has been done.

    Any number of processes may call it at once: one writes while the others wait. Raises
    ConfigError for text that cannot be read, an output that cannot be written, or indexed data that
    is not whole.
    """
    files = text_files(data)
    prefix = prefix_of(data, files)
    if not _is_there(prefix):
        with file_lock(_suffixed(prefix, "idx.lock")):
            if not _is_there(prefix):  # whoever had the lock before has not written it
                _write(prefix, files)
    return read_indexed_data(prefix)


def _is_there(prefix: Path) -> bool:
    """One of both may be gone, as from scratch space that is purged."""
    return all(_suffixed(prefix, suffix).exists() for suffix in _SUFFIXES)


def _suffixed(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{suffix}")


def _write(prefix: Path, files: Sequence[TextFile]) -> None:
    """Writes both files in a directory of this process, and onto the disk, then moves them: where
    both are, the data is whole. What others put under a name in `prefix.parent` is not followed."""
    import numpy as np

    try:
        with TemporaryDirectory(prefix=f".{prefix.name}.", dir=prefix.parent) as directory:
            made = {suffix: Path(directory, suffix) for suffix in _SUFFIXES}
            with made["bin"].open("wb") as stream:
                for file in files:
                    text = np.frombuffer(_read(file), np.uint8)
                    stream.write(np.append(text, np.uint16(END_OF_DOCUMENT)).tobytes())
            write_index(made["idx"], [file.take_bytes + 1 for file in files])
            for path in made.values():
                flush_to_disk(path)
            for suffix, path in made.items():
                path.replace(_suffixed(prefix, suffix))
        flush_to_disk(prefix.parent)
    except OSError as error:
        raise ConfigError(f"{prefix}: cannot be written: {error.strerror}") from error


def _read(file: TextFile) -> bytes:
    try:
        with file.path.open("rb") as stream:
            text = stream.read(file.take_bytes)
    except OSError as error:
        raise ConfigError(f"data.text: {file.path} cannot be read: {error.strerror}") from error
    if len(text) != file.take_bytes:
        raise ConfigError(f"data.text: {file.path} shrank while it was read")
    return text
