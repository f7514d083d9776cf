"""What a warm process keeps clear of."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from liver_hpc.errors import LiverError
from liver_hpc.worker.warm import _in_a_child, _knowing_of_cuda, _read_from


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_module_that_asks_for_cuda_as_it_is_imported_does_not_reach_the_driver(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> bool:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    with _knowing_of_cuda(has_cuda):
        assert torch.cuda.is_available() is has_cuda
    with pytest.raises(AssertionError, match="the driver was asked"):
        torch.cuda.is_available()


def test_what_forked_workers_would_read_on_together_is_known(tmp_path: Path) -> None:
    read, written, before = tmp_path / "read", tmp_path / "written", _read_from()
    with read.open("w+"), written.open("w"), socket.socket() as one:
        found = _read_from() - before
        assert found == {str(read), os.readlink(f"/proc/self/fd/{one.fileno()}")}
    assert _read_from() == before


@pytest.mark.parametrize("finds", [True, False])
def test_what_a_child_finds_is_known(finds: bool) -> None:
    assert _in_a_child(lambda: finds) is finds


def test_a_child_that_is_late_does_not_say_no() -> None:
    """Else a node whose driver is slow would have its workers train on CPUs."""

    def has_cuda() -> bool:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # instead of pytest's
        signal.raise_signal(signal.SIGALRM)
        return True

    with pytest.raises(LiverError, match=r"has_cuda: SIGALRM has ended the child .* 60 s"):
        _in_a_child(has_cuda)
