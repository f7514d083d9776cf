"""Pinned memory, with a stand-in for the CUDA runtime that notes what it is told."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.world.host_memory import MemoryPool, pinned_memory, plain_memory

SUCCESS, REFUSED = 0, 2


class PlayedRuntime:
    """known: bytes by address, of what is registered now. answer: to the next registrations."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.answer = SUCCESS

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if self.answer == SUCCESS:
            self.known[address] = num_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.known[address]
        return SUCCESS


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedRuntime:
    played = PlayedRuntime()

    def check(result: int) -> None:
        if result != SUCCESS:
            raise RuntimeError(f"CUDA error {result}")

    cuda: Any = SimpleNamespace(cudart=lambda: played, check_error=check)
    monkeypatch.setattr(torch, "cuda", cuda)
    return played


def test_the_device_knows_just_as_much_until_the_last_view_is_gone(runtime: PlayedRuntime) -> None:
    num_bytes = 3 * 2**20 + 17
    memory = pinned_memory(num_bytes)
    assert runtime.known == {memory.data_ptr(): num_bytes}
    assert memory.shape == (num_bytes,)
    view = memory[64:128].view(torch.int64)
    view.fill_(7)
    assert int(memory.count_nonzero()) == len(view)
    del memory
    gc.collect()
    assert runtime.known
    assert view.tolist() == [7] * 8
    del view
    gc.collect()
    assert not runtime.known


def test_what_the_device_refuses_is_told_and_not_taken_from_it(runtime: PlayedRuntime) -> None:
    runtime.answer = REFUSED
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        pinned_memory(4096)
    gc.collect()


@pytest.mark.usefixtures("runtime")
def test_what_a_process_forks_has_none_of_it() -> None:
    """On an old kernel the page that the device knows may be left to the forked process."""
    memory = pinned_memory(4096)
    mapped = Path("/proc/self/smaps").read_text().split(f"{memory.data_ptr():x}-", 1)[1]
    flags = next(line for line in mapped.splitlines() if line.startswith("VmFlags"))
    assert "dc" in flags.split(), "do not copy on fork"


def test_nothing_is_nothing(runtime: PlayedRuntime) -> None:
    assert pinned_memory(0).numel() == 0
    assert not runtime.known


def test_a_pool_gives_what_it_got_back_where_it_has_that_size() -> None:
    pool = MemoryPool(plain_memory)
    small, large = pool.take(64), pool.take(128)
    pool.give_back([small, large])
    assert pool.take(128) is large
    assert pool.take(128) is not large
    pool.clear()
    assert pool.take(64) is not small
