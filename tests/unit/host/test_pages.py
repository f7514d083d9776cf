from __future__ import annotations

import ctypes
import errno
import mmap
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from liver_hpc.host import pages
from liver_hpc.host.pages import populate

SIZE = 64 << 20


def test_what_is_populated_is_there_and_only_that() -> None:
    process, memory = psutil.Process(), torch.empty(2 * SIZE, dtype=torch.uint8)
    before_bytes = process.memory_info().rss
    assert populate(memory.data_ptr(), SIZE)
    assert 0.9 * SIZE < process.memory_info().rss - before_bytes < 1.5 * SIZE


def test_what_it_holds_stays() -> None:
    memory = torch.arange(1 << 20)
    assert populate(memory.data_ptr() + 8, memory.nbytes - 24)
    assert torch.equal(memory, torch.arange(1 << 20))


def test_less_than_a_page_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_libc", lambda: pytest.fail("no page lies in it"))
    for address in (mmap.PAGESIZE, mmap.PAGESIZE + 1):
        assert populate(address, mmap.PAGESIZE - 1)
    assert populate(0, 0)


@pytest.mark.parametrize("again", [errno.EINTR, errno.EAGAIN])
def test_what_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch, again: int) -> None:
    asked = answering(monkeypatch, [again, 0, 0])
    assert populate(mmap.PAGESIZE, pages.AT_ONCE_BYTES + mmap.PAGESIZE)
    rest = (mmap.PAGESIZE + pages.AT_ONCE_BYTES, mmap.PAGESIZE)
    assert asked == [*[(mmap.PAGESIZE, pages.AT_ONCE_BYTES)] * 2, rest]


def test_a_kernel_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, [errno.EINVAL])
    assert not populate(mmap.PAGESIZE, SIZE)
    assert len(asked) == 1


def test_no_memory_is_an_error() -> None:
    with pytest.raises(OSError, match=f"{mmap.PAGESIZE} bytes of memory: ENOMEM"):
        populate(mmap.PAGESIZE, mmap.PAGESIZE)


def answering(monkeypatch: pytest.MonkeyPatch, answers: list[int]) -> list[tuple[int, int]]:
    asked = []

    def madvise(address: int, num_bytes: int, _advice: int) -> int:
        asked.append((address, num_bytes))
        problem = answers.pop(0)
        ctypes.set_errno(problem)
        return -1 if problem else 0

    played: Any = SimpleNamespace(madvise=madvise)
    monkeypatch.setattr(pages, "_libc", lambda: played)
    return asked
