"""What a world is told of work in its groups that NCCL's failure has ended undone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liver_hpc.errors import TransferError
from liver_hpc.world.device import Device
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.world import World
from tests.late_device import LateBackend, LateDevice, LateGroup, Machines

FAILED = r"NCCL between workers 3, 5 has failed: COMM_ERROR"


@pytest.fixture
def device() -> LateDevice:
    return LateDevice(Machines(), 3)


@pytest.fixture
def book(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> GroupBook:
    """Two groups of worker 3, and one in which it is alone."""
    monkeypatch.setattr("liver_hpc.world.groups.Group", LateGroup)
    book = GroupBook(1, 3, device)
    for members in ((3, 4), (3, 5)):
        book.group(members).attach(LateBackend(device, str(members), 0, 1))
    book.group((3,))
    return book


def test_a_group_that_has_failed_is_named(book: GroupBook) -> None:
    book.check()
    book.group((3, 5)).backend.fail()
    with pytest.raises(TransferError, match=FAILED):
        book.check()


def test_what_was_aborted_here_may_have_ended_undone_too(
    book: GroupBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.world.groups.end", lambda _backend: None)
    book.abort(shared=True)
    with pytest.raises(TransferError, match="groups of generation 1 were aborted"):
        book.check()


def test_gloos_waits_raise_themselves_and_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backends do not tell."""

    class Backend:
        """Of gloo."""

    monkeypatch.setattr("liver_hpc.world.groups.Group", LateGroup)
    book = GroupBook(1, 3, Device(torch.device("cpu")))
    book.group((3, 5)).attach(Backend())
    book.check()


@pytest.mark.parametrize("fails", ["before", "meanwhile", "never"])
def test_the_end_of_a_step_and_of_an_evaluation_ask(
    fails: str, book: GroupBook, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is known before, nobody else is told that the step is done."""
    backend, reduced = book.group((3, 5)).backend, []

    def reduce(values: torch.Tensor, group: Any) -> None:
        reduced.append(group)
        if fails == "meanwhile":
            backend.fail()

    monkeypatch.setattr(dist, "all_reduce", reduce)
    groups = SimpleNamespace(intra_dist_opt="all")
    world: Any = SimpleNamespace(book=book, device=device, groups=groups)
    if fails == "before":
        backend.fail()
    if fails == "never":
        assert World._summed(world, 1.0, 2.0) == [1.0, 2.0]
    else:
        with pytest.raises(TransferError, match=FAILED):
            World._summed(world, 1.0, 2.0)
    assert bool(reduced) == (fails != "before")
