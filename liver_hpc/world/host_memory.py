"""Host memory for copies of the state.

A GPU copies into pinned memory beside the host. torch's own is rounded up to a power of two, and
kept for tensors of that size once it was made: of shares of many gigabytes, in one layout after
another, that could be all that a node has. So it is pinned here, as much as is asked for, and goes
with its last tensor.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from liver_hpc.host.pages import populate

NewMemory = Callable[[int], torch.Tensor]
"""Makes [bytes] of uint8, which may take a while."""

BOUND_BYTES = 64
"""A part of some memory begins on a multiple of it."""


def plain_memory(num_bytes: int) -> torch.Tensor:
    """[num_bytes] of uint8, as the process has it. Its pages are there."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if not populate(memory.data_ptr(), num_bytes):
        memory.zero_()
    return memory


def in_one_run(sizes: Sequence[int], new_memory: NewMemory) -> list[torch.Tensor]:
    """Parts of so many bytes of one memory, each of which begins on a bound."""
    starts = [*accumulate((-(-size // BOUND_BYTES) * BOUND_BYTES for size in sizes), initial=0)]
    memory = new_memory(starts[-1])
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class MemoryPool:
    """Memory that is taken and given back, and then taken again: to clear its pages, and to pin
    them for a GPU, takes longer than to copy a state into them. From any thread."""

    def __init__(self, new_memory: NewMemory) -> None:
        self._new_memory = new_memory
        self._free: list[torch.Tensor] = []
        self._changing = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] of uint8: what had that size before, with what it held, else new."""
        with self._changing:
            for place, memory in enumerate(self._free):
                if memory.numel() == num_bytes:
                    return self._free.pop(place)
        return self._new_memory(num_bytes)

    def give_back(self, memory: Iterable[torch.Tensor]) -> None:
        """Nobody writes to it any more, nor relies on what it holds."""
        with self._changing:
            self._free += memory

    def clear(self) -> None:
        """Lets go of what is not taken."""
        with self._changing:
            self._free.clear()


class _Pages(mmap.mmap):
    """Memory of this process alone. address: by which the device knows it; 0 before it does."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def pinned_memory(num_bytes: int) -> torch.Tensor:
    """[num_bytes] of uint8, zero. Takes as long as the system needs to clear the pages.

    Raises RuntimeError where the device cannot have them, OSError where there are none.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A fork would copy all of it, or have the device go on with pages that are the child's now.
    pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    pages.address = address
    return memory
