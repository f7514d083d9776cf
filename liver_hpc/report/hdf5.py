"""The HDF5 file of a run: one process appends, others read at any time (SWMR).

HDF5 takes a full disk badly: it keeps what it could not write, has been seen to lose rows that it
had written before, and crashes the process at its end. So a new file is made in memory and put on
the disk by ordinary means, and a file that HDF5 failed to write to is let go at once, without
another byte written.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from liver_hpc.errors import ConfigError
from liver_hpc.report.table import FIRST_TABLES, TABLES, Rows, Table

# The oldest format that knows SWMR: older tools read it too.
FORMAT = ("v110", "v110")
# What h5py raises for a failed system call, or for a file that makes no sense.
HDF5_ERRORS = (OSError, RuntimeError)

# The first bytes of a file: the signature, the version, (from byte 28) where the file ends, ...
SIGNATURE = b"\x89HDF\r\n\x1a\n"
SUPERBLOCK_BYTES = 48
KNOWN_SUPERBLOCKS = (2, 3)


class SwmrFile:
    """A metrics file that is being written. After a failed `append`, which raises one of
    HDF5_ERRORS, nothing but `let_go` may be called."""

    def __init__(self, path: Path, attributes: Mapping[str, str], rows: Mapping[str, Rows]) -> None:
        """Puts a new file, with these rows by table name, in the place of whatever is at `path`.

        Readers find the file whole, and writable by nobody else, or not at all.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(_image(path, attributes, rows))
            # No lock: a reader that holds one must not stop the writer.
            self._file = h5py.File(temporary, "r+", libver=FORMAT, locking=False)
            try:
                self._file.swmr_mode = True
                os.replace(temporary, path)
            except HDF5_ERRORS:
                self.let_go()
                raise
        finally:
            temporary.unlink(missing_ok=True)

    def append(self, rows: Mapping[str, Rows]) -> None:
        """Adds rows, by table name; afterwards they survive the end of this process."""
        for name, new in rows.items():
            dataset = self._file[name]
            start = len(dataset)
            dataset.resize((start + len(new),))
            dataset[start:] = new
            dataset.flush()
        # Only the file's flush writes down where the file ends, from which a reader knows whether
        # it is whole. It grows to there first, in case this process is killed in between.
        descriptor = self._file.id.get_vfd_handle()
        end_bytes = self._file.id.get_filesize()
        if os.fstat(descriptor).st_size < end_bytes:
            os.truncate(descriptor, end_bytes)
        self._file.flush()

    def close(self) -> None:
        """Marks the file as no longer written to. Raises OSError, and has let go, where the disk
        does not even take that: HDF5 would crash."""
        descriptor = self._file.id.get_vfd_handle()
        try:
            superblock = os.pread(descriptor, SUPERBLOCK_BYTES, 0)
            if os.pwrite(descriptor, superblock, 0) < len(superblock):
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        except OSError:
            self.let_go()
            raise
        self._file.close()

    def let_go(self) -> None:
        """Closes without writing another byte: the file stays as readers see it now.

        HDF5 cannot be told to forget what it failed to write, so it gets to write it elsewhere.
        """
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._file.id.get_vfd_handle(), inheritable=False)
        os.close(nowhere)
        self._file.close()


def read_file(path: Path) -> tuple[dict[str, Rows], dict[str, str]]:
    """Rows by table name, and the attributes, of a file that may be being written.

    A table that the file's version did not know is empty.
    Raises ConfigError when it is missing, truncated, or not such a file.
    """
    try:
        _check_whole(path)
        # No lock: a reader must never stop the writer.
        with h5py.File(path, "r", swmr=True, locking=False) as file:
            attributes = {name: _text(value) for name, value in file.attrs.items()}
            return {table.name: _read(file, table, path) for table in TABLES}, attributes
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


def _image(path: Path, attributes: Mapping[str, str], rows: Mapping[str, Rows]) -> bytes:
    """The bytes of a new file, with everything that SWMR does not let one create later."""
    with h5py.File(path, "w", libver=FORMAT, driver="core", backing_store=False) as file:
        for table in TABLES:
            first = rows.get(table.name, table.rows([]))
            file.create_dataset(
                table.name, data=first, maxshape=(None,), chunks=(table.chunk_rows,)
            )
        for name, text in attributes.items():
            # A null-padded text ends at its first zero byte, and has at least one byte.
            data = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
            kind = h5py.string_dtype("utf-8", max(1, len(data)))
            file.attrs.create(name, data, dtype=kind)
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def _read(file: Any, table: Table[Any], path: Path) -> Rows:
    dataset = file.get(table.name)
    if dataset is None and table not in FIRST_TABLES:
        return table.rows([])
    if not isinstance(dataset, h5py.Dataset):
        raise ConfigError(f"{path} is no metrics file: it has no table /{table.name}")
    missing = table.required - set(dataset.dtype.names or ())
    if missing:
        raise ConfigError(
            f"{path}: table /{table.name} lacks {sorted(missing)}; "
            "another version of liver_hpc wrote it"
        )
    rows: Rows = dataset[:]
    return rows


def _check_whole(path: Path) -> None:
    """HDF5 reads zeros, or waits for ever, where the end of a file that is written to is lost."""
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


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
