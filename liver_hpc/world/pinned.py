"""Host memory that a GPU reads and writes beside the host: as much as was asked for, and given back
with its last tensor.

torch's own pinned memory is rounded up to a power of two and kept once it was made, for tensors of
that size: of shares of many gigabytes, in one layout after another, that could be all of a node's.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


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
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    pages.address = address
    return memory
