"""What a wire over a process group keeps when its backend fails."""

from __future__ import annotations

import weakref

import pytest
import torch

from liver_hpc.errors import TransferError
from liver_hpc.transport.wire import Parcel, group_wire


class _Broken:
    """A group whose peer has gone; like torch's, its calls have no frames that know it."""

    @staticmethod
    def send(_memory: list[torch.Tensor], _rank: int, _tag: int) -> None:
        raise RuntimeError("Connection closed by peer")

    recv = send


@pytest.mark.parametrize("is_send", [True, False])
def test_an_error_in_starting_keeps_no_connection(is_send: bool) -> None:
    """Whoever waits for this worker is freed once it has closed, while its error still lives."""
    group = _Broken()
    gone = weakref.ref(group)
    wire = group_wire(group, {0: 0, 1: 1}, torch.device("cpu"))
    del group
    with pytest.raises(TransferError, match="worker 1: Connection closed") as failed:
        wire.launch([Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), is_send)])
    wire.close()
    assert failed.value.__traceback__ is not None
    assert gone() is None
