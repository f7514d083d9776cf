"""Tensors that are made and never written to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_hpc.world.memoryless import Memoryless, parameters
from liver_hpc.world.untouched import Kept, Untouched

Mode = Callable[[], AbstractContextManager[Any]]

MODES = pytest.mark.parametrize("mode", [lambda: Untouched(Kept()), Memoryless, parameters])
LARGE = 16 * 2**20
"""Elements, of 4 bytes: more than the heap keeps."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def made(source: torch.Tensor) -> list[torch.Tensor]:
    """As Megatron makes a world's memory, from parameters in bf16."""
    buffer = torch.zeros(LARGE, dtype=torch.float32, requires_grad=False)
    buffer.copy_(source)
    main = source.clone().detach().float()
    moment = torch.empty_like(main).zero_()
    other = torch.zeros_like(main)
    return [buffer, main, moment, other, torch.empty(LARGE).fill_(1.0)]


def test_no_page_of_them_exists() -> None:
    source = torch.empty(LARGE, dtype=torch.bfloat16)
    with Untouched(Kept()):
        made(source)  # what a process imports as it does so for the first time
    before = resident_bytes()
    with Untouched(Kept()):
        tensors = made(source)
    took = resident_bytes() - before
    assert all(tensor.shape == (LARGE,) for tensor in tensors)
    assert all(tensor.dtype is torch.float32 for tensor in tensors)
    assert all(tensor.untyped_storage().nbytes() == 4 * LARGE for tensor in tensors)
    assert took < 2**22
    tensors[0].zero_()
    assert resident_bytes() - before - took > 3 * LARGE


@MODES
def test_counters_and_single_values_are_what_they_are(mode: Mode) -> None:
    with mode():
        scale = torch.tensor([2.0]).float().clone()
        step = torch.zeros(())
        step.fill_(3.0)
        numbers = torch.zeros(4, dtype=torch.int64)
        numbers.copy_(torch.arange(4))
        floats = torch.arange(4).float()
    assert (float(scale), float(step)) == (2.0, 3.0)
    assert numbers.tolist() == [0, 1, 2, 3]
    assert floats.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_views_lie_where_they_would() -> None:
    with Untouched(Kept()):
        buffer = torch.zeros(64)
        view = buffer[16:32].view(4, 4)
    view.fill_(5.0)
    assert buffer[16:32].tolist() == [5.0] * 16


@MODES
def test_another_thread_trains_meanwhile(mode: Mode) -> None:
    found: list[float] = []

    def train() -> None:
        total = torch.zeros(8)
        total.copy_(torch.ones(8))
        found.append(float(total.clone().sum()))

    with mode():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert found == [8.0]


@MODES
def test_it_ends_with_an_error_too(mode: Mode) -> None:
    with pytest.raises(ValueError, match="of the caller"), mode():
        raise ValueError("of the caller")
    assert torch.zeros(8).copy_(torch.ones(8)).tolist() == [1.0] * 8


def test_what_was_kept_is_used_once_where_size_and_type_are_the_same() -> None:
    first, second = torch.full((6,), 1.0), torch.full((2, 3), 2.0)
    other, view = torch.zeros(6, dtype=torch.bfloat16), first[2:]
    like = torch.ones(6)
    with Untouched(Kept([first, view, second, other])):
        made = [torch.zeros(3, 2), torch.empty_like(like), torch.zeros(6)]
        larger, low = torch.zeros(8), torch.zeros(6).bfloat16()
    addresses = [tensor.data_ptr() for tensor in made]
    assert {first.data_ptr(), second.data_ptr()} < {*addresses}
    assert len({*addresses}) == 3
    assert made[0].shape == (3, 2)
    assert low.data_ptr() == other.data_ptr()
    assert larger.untyped_storage().nbytes() == 32
    assert sorted(first.tolist() + second.flatten().tolist()) == 6 * [1.0] + 6 * [2.0]


def test_what_was_kept_and_not_used_is_freed() -> None:
    before = resident_bytes()
    kept = Kept([torch.ones(LARGE), torch.ones(2 * LARGE)])
    with Untouched(kept):
        used = torch.zeros(LARGE)
    del kept
    assert 3 * LARGE < resident_bytes() - before < 5 * LARGE
    assert used[0] == 1.0


@MODES
def test_other_threads_may_compile_meanwhile(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's modes, those that do not say this set a flag of the whole process."""
    from torch.utils import _python_dispatch

    name = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(_python_dispatch, name, False)  # whatever modes have left it before
    with mode():
        assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
