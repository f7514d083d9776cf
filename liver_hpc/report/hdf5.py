"""A run's records as one HDF5 file: a table for each kind of record, one row each.

HDF5 takes a full disk badly: it has been seen to lose what it had written before, and to crash the
process. So the file is made in memory and put on the disk by ordinary means.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import h5py
import numpy as np
import numpy.typing as npt

from liver_hpc.errors import ConfigError
from liver_hpc.host.files import write_whole
from liver_hpc.run.records import TABLES, RunRecords

# The oldest format that files of this package need: older tools read it too.
FORMAT = ("v110", "v110")
# What h5py raises for a failed system call, or for a file that makes no sense.
HDF5_ERRORS = (OSError, RuntimeError)

# The first bytes of a file: the signature, the version, (from byte 28) where the file ends, ...
SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUPERBLOCK_BYTES = 48
KNOWN_SUPERBLOCKS = (2, 3)

Rows = npt.NDArray[Any]


def write_hdf5(path: Path, records: RunRecords) -> None:
    """Puts the file in the place of whatever is at `path`, whole or not at all. Raises OSError."""
    made = io.BytesIO()  # HDF5's own image of a file that is open has a wrong checksum before 2.0
    with h5py.File(made, "w", libver=FORMAT) as file:
        for name, kind in TABLES.items():
            file.create_dataset(name, data=_rows(kind, getattr(records, name)))
        for name, text in records.attributes.items():
            (data,) = texts = _texts([text])
            file.attrs.create(name, data, dtype=texts.dtype)
    write_whole(path, made.getvalue())


def read_hdf5(path: Path) -> RunRecords:
    """The records of a file. Raises ConfigError when it is missing, truncated, or no such file."""
    try:
        _check_whole(path)
        with h5py.File(path, "r", locking=False) as file:
            return RunRecords(
                attributes={name: str(_plain(value)) for name, value in file.attrs.items()},
                **{name: _records(file.get(name), name, path) for name in TABLES},
            )
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; nothing was recorded yet") from None
    except HDF5_ERRORS as error:
        raise ConfigError(f"{path} cannot be read: {failure_text(error)}") from error


def failure_text(error: Exception) -> str:
    """What went wrong, without the addresses and times that HDF5 tells of a system call."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    _, found, rest = str(error).partition("error message = '")
    return rest.partition("'")[0] if found else str(error)


def _rows(kind: type[Any], records: Sequence[Any]) -> Rows:
    """float64, int64, bool and UTF-8 as long as the longest text of its column."""
    columns: dict[str, Rows] = {}
    for name, hint in get_type_hints(kind).items():
        values = [getattr(record, name) for record in records]
        columns[name] = _texts(values) if hint is str else np.array(values, dtype=np.dtype(hint))
    dtypes = [(name, column.dtype) for name, column in columns.items()]
    return np.rec.fromarrays(list(columns.values()), dtypes)


def _texts(texts: Sequence[str]) -> Rows:
    # A null-padded text ends at its first zero byte, and has at least one byte.
    kept = [t.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace") for t in texts]
    size_bytes = max([1, *map(len, kept)])
    return np.array(kept, dtype=h5py.string_dtype("utf-8", size_bytes))


def _records(dataset: Any, name: str, path: Path) -> list[Any]:
    if not isinstance(dataset, h5py.Dataset):
        raise ConfigError(f"{path} is no metrics file: it has no table /{name}")
    kind = TABLES[name]
    known = [field.name for field in fields(kind)]
    if missing := {*known}.difference(dataset.dtype.names or ()):
        raise ConfigError(
            f"{path}: table /{name} lacks {sorted(missing)}; another version of liver_hpc wrote it"
        )
    rows = dataset[:][known].tolist()
    return [kind(**dict(zip(known, map(_plain, row), strict=True))) for row in rows]


def _check_whole(path: Path) -> None:
    """HDF5 reads zeros, or waits for ever, where the end of a file is lost."""
    with path.open("rb") as file:
        head = file.read(SUPERBLOCK_BYTES)
        got_bytes = os.fstat(file.fileno()).st_size
    if not head.startswith(SIGNATURE):
        raise ConfigError(f"{path} is no metrics file: it is not HDF5, or its beginning is lost")
    whole = len(head) == SUPERBLOCK_BYTES
    if whole and head[8] in KNOWN_SUPERBLOCKS:
        (wanted_bytes,) = struct.unpack_from("<Q", head, 28)
        whole = got_bytes >= wanted_bytes
    if not whole:
        raise ConfigError(f"{path} is truncated: only {got_bytes} bytes of it are left")


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
