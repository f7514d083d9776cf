from __future__ import annotations

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


def test_it_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, 0)
    assert populate(mmap.PAGESIZE, pages.AT_ONCE_BYTES + mmap.PAGESIZE)
    rest = (mmap.PAGESIZE + pages.AT_ONCE_BYTES, mmap.PAGESIZE)
    assert asked == [(mmap.PAGESIZE, pages.AT_ONCE_BYTES), rest]


def test_a_kernel_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, -1)
    assert not populate(mmap.PAGESIZE, SIZE)
    assert len(asked) == 1


def test_where_there_is_no_memory_nothing_happens() -> None:
    assert not populate(mmap.PAGESIZE, mmap.PAGESIZE)


def answering(monkeypatch: pytest.MonkeyPatch, answer: int) -> list[tuple[int, int]]:
    asked = []

    def madvise(address: int, num_bytes: int, _advice: int) -> int:
        asked.append((address, num_bytes))
        return answer

    played: Any = SimpleNamespace(madvise=madvise)
    monkeypatch.setattr(pages, "_libc", lambda: played)
    return asked
