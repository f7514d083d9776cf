"""Host memory as the device has it."""

from __future__ import annotations

import gc

import pytest
import torch

from liver_hpc.world.host_memory import pinned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

BYTES = 96 * 2**20 + 8
"""Of which torch's own would be 128 MiB."""


def test_the_device_copies_into_it_beside_the_host_and_it_goes_with_its_last_view() -> None:
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    memory = pinned_memory(BYTES)
    assert memory.is_pinned()
    source = torch.arange(BYTES // 8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        memory.view(torch.int64).copy_(source, non_blocking=True)
    stream.synchronize()
    assert torch.equal(memory.view(torch.int64), source.cpu())
    view = memory[4096:8192]
    del memory
    gc.collect()
    assert view.is_pinned()
    address = view.data_ptr()
    del view
    gc.collect()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert runtime.cudaHostUnregister(address) != runtime.cudaError.success, "nobody knows it now"
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
