"""Whether a load comes from memory or from the disk. Linux only; wants no privilege."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

WARM, DROPPED = "warm", "dropped"


def files_of(directory: Path) -> Iterator[Path]:
    """All files under a directory."""
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def num_bytes(directory: Path) -> int:
    """The length of all files under a directory."""
    return sum(path.stat().st_size for path in files_of(directory))


def drop(directory: Path) -> str:
    """Flushes all files to the disk and asks the kernel to forget them; what the page cache then
    is: DROPPED, or how much of it has stayed (a file system without a disk forgets nothing)."""
    for path in files_of(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    share = resident_share(directory)
    return DROPPED if share < 0.01 else f"{share:.0%} {WARM}, it could not be dropped"


def resident_share(directory: Path) -> float:
    """The share of the files' bytes that are in memory, 0 to 1; 0 for no bytes."""
    resident = total = 0
    for path in files_of(directory):
        total += path.stat().st_size
        resident += _resident_bytes(path)
    return resident / total if total else 0.0


def _resident_bytes(path: Path) -> int:
    """By mincore(2); at most the file's length."""
    length = path.stat().st_size
    if length == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as view:
        pages = -(-length // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(view)
        try:
            code = libc.mincore(ctypes.byref(anchor), ctypes.c_size_t(length), flags)
        finally:
            del anchor
        if code != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    return min(length, sum(flag & 1 for flag in flags) * mmap.PAGESIZE)
