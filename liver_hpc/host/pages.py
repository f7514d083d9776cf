"""Memory whose pages are there before it is used."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), which Linux has since 5.14, and Python no name for."""
AT_ONCE_BYTES = 1 << 20
"""What the caches hold of it; and other threads that map memory wait for no more than this."""


def populate(address: int, num_bytes: int) -> bool:
    """Has the kernel make all pages that lie in some memory of this process, whose content stays:
    which takes less than to write to each. Other threads go on meanwhile.

    False where the kernel does not: it is older, or has no memory left.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(first, end, AT_ONCE_BYTES):
        if _libc().madvise(start, min(AT_ONCE_BYTES, end - start), _POPULATE_WRITE):
            return False
    return True


@cache
def _libc() -> Any:
    """Its functions let go of Python's lock."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
