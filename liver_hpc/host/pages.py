"""Memory whose pages are there before it is used."""

from __future__ import annotations

import ctypes
import errno
import mmap
from functools import cache
from typing import Any

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), which Linux has since 5.14, and Python no name for."""
AT_ONCE_BYTES = 1 << 20
"""What the caches hold of it; and other threads that map memory wait for no more than this."""


def populate(address: int, num_bytes: int) -> bool:
    """Has the kernel make all pages that lie in some memory of this process, whose content stays:
    for two thirds of what it takes to write to each. Other threads go on meanwhile.

    False where the kernel does not know how. Raises OSError where there is no memory.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(first, end, AT_ONCE_BYTES):
        size = min(AT_ONCE_BYTES, end - start)
        while _libc().madvise(start, size, _POPULATE_WRITE):
            problem = ctypes.get_errno()
            if problem == errno.EINVAL:
                return False
            if problem not in (errno.EINTR, errno.EAGAIN):
                raise OSError(problem, f"{size} bytes of memory: {errno.errorcode[problem]}")
    return True


@cache
def _libc() -> Any:
    """Its functions let go of Python's lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
