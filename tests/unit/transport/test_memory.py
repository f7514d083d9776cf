"""The in-memory twin: the conformance suite in threads, and random plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import TransferError
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, Move, TensorSpec, TransferPlan
from liver_hpc.transport import stream
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import Parcel, Pending, Wire
from tests.unit.layout.models import TIED
from tests.unit.transport.conformance import (
    LONG_S,
    Member,
    ToyState,
    TransportConformance,
    random_bits,
)
from tests.unit.transport.memory import MemoryExchange
from tests.unit.transport.plans import RandomPlans, random_plans


def in_threads(
    scenario: Callable[..., Any], workers: int, *arguments: Any, grouped: bool = False
) -> list[Any]:
    """Each worker is a thread; raises the first worker's error."""
    exchange = MemoryExchange(grouped=grouped)
    together = threading.Barrier(workers, timeout=LONG_S)

    def member(worker: int) -> Member:
        def connect(model: ModelSpec, handoff: HandoffSection) -> Transport:
            return exchange.transport(worker, model, handoff)

        return Member(worker, connect, depart=lambda: None, meet=together.wait)

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(scenario, member(worker), *arguments) for worker in range(workers)]
        return [future.result() for future in running]


class TestMemory(TransportConformance):
    def run(self, scenario: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        return in_threads(scenario, workers, *arguments)


class TestGroupedMemory(TransportConformance):
    """The large steps of NCCL, without NCCL."""

    def run(self, scenario: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        return in_threads(scenario, workers, *arguments, grouped=True)


@pytest.mark.parametrize(
    ("staging_bytes", "bucket_bytes", "grouped", "slots"),
    [
        (1000, 100, False, [96] * 9),
        (1000, 100, True, [432] * 2),
        (100, 96, True, [96]),
        (200, 97, True, [96] * 2),
    ],
)
def test_staging_is_one_slot_a_bucket_or_two_halves_and_leaves_an_eighth(
    staging_bytes: int, bucket_bytes: int, grouped: bool, slots: list[int]
) -> None:
    handoff = HandoffSection(staging_bytes=staging_bytes, bucket_bytes=bucket_bytes)
    transport = MemoryExchange(grouped=grouped).transport(0, TIED, handoff)
    assert [transport.slot_bytes] * transport.num_slots == slots
    assert transport._staging is not None
    assert transport._staging.nbytes == sum(slots) <= staging_bytes


def _move(member: Member, case: RandomPlans, handoff: HandoffSection) -> None:
    transport = member.connect(case.model, handoff)
    was, becomes = ToyState(case.model, random_bits(3)), ToyState(case.model, random_bits(4))
    wanted = ToyState(case.model, random_bits(4))
    plan = case.plans[member.worker]
    transport.stream(transport.prepare(plan), was, becomes, lambda _bytes: None, member.deadline())
    for move in (*plan.receives, *plan.local):
        place = move.kind, move.tensor_index, move.box
        wanted.view(*place).copy_(was.view(*place))
    for key in wanted.memory:
        assert torch.equal(becomes.bits(key), wanted.bits(key)), key


@settings(max_examples=30)
@given(random_plans(), st.integers(16, 300), st.integers(0, 900), st.booleans())
def test_random_plans_with_random_budgets_arrive(
    case: RandomPlans, bucket_bytes: int, more_bytes: int, grouped: bool
) -> None:
    handoff = HandoffSection(staging_bytes=bucket_bytes + more_bytes, bucket_bytes=bucket_bytes)
    in_threads(_move, len(case.plans), case, handoff, grouped=grouped)


def test_messages_of_different_length_fail_at_both_ends() -> None:
    """Two workers with different ideas of the plan are told so."""
    model = ModelSpec((TensorSpec("t", (4, 4)),), {"pp1": (((0,),),)}, parameter_bytes=4)

    def differ(member: Member) -> None:
        rows = 4 if member.worker == 0 else 3
        move = Move(0, PARAMETER, Box(0, rows, 0, 4), 0, 1)
        sends, receives = ((move,), ()) if member.worker == 0 else ((), (move,))
        transport = member.connect(model, HandoffSection(staging_bytes=64, bucket_bytes=64))
        state = ToyState(model, random_bits(3))
        with pytest.raises(TransferError, match="sent are 64 bytes, wanted 48"):
            transport.stream(
                transport.prepare(TransferPlan(member.worker, sends, receives, ())),
                state, state, lambda _bytes: None, member.deadline(),
            )  # fmt: skip

    in_threads(differ, 2)


class _Recorder(Wire):
    """Keeps what it is told to send and receive; everything has crossed at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []

    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        self.parcels += parcels
        return ()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("worker", [0, 1])
def test_a_message_that_is_one_run_of_bytes_is_not_staged(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows go straight from and into the world; columns, and boxes that share, do not. Only
    what is staged has pages beforehand."""
    model = ModelSpec(
        tuple(TensorSpec(name, (8, 8)) for name in "abcd"), {"pp1": (((0, 1, 2, 3),),)}, 4
    )
    boxes = [Box(2, 8, 0, 8), Box(0, 8, 2, 6), Box(0, 1, 0, 1), Box(0, 1, 0, 1)]
    moves = tuple(Move(index, PARAMETER, box, 0, 1) for index, box in enumerate(boxes))
    wire, state = _Recorder(), ToyState(model, random_bits(3))
    handoff = HandoffSection(staging_bytes=2048, bucket_bytes=256)
    transport = Transport(wire, model, handoff)
    plan = TransferPlan(worker, *((moves, ()) if worker == 0 else ((), moves)), ())
    deadline, there = Member.deadline(), list[tuple[int, int]]()
    monkeypatch.setattr(stream, "populate", lambda *memory: there.append(memory) or True)
    prepared = [
        transport.prepare(plan, *worlds)
        for worlds in [(), (None, None), (state, None), (None, state), (state, state)]
    ]
    transport.stream(prepared[-1], state, state, lambda _bytes: None, deadline)
    where = [parcel.memory.data_ptr() for parcel in wire.parcels]
    assert [parcel.memory.numel() for parcel in wire.parcels] == [192, 128, 32]
    assert where[0] == state.memory[PARAMETER, 0][2:].data_ptr()
    assert transport._staging is not None
    start = transport._staging.data_ptr()
    slots = [2, 2, *((1, 2) if worker == 0 else (2, 1)), 1]
    assert there == [(start, each * 256) for each in slots]
    assert all(start <= address < start + 2048 for address in where[1:])


def test_closed_while_its_pages_come_to_be_it_gives_staging_back_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Halt closes from another thread, while PREPARE or a refill writes there."""
    transport = MemoryExchange().transport(0, TIED, HandoffSection())
    staging = transport._staging
    assert staging is not None
    there: list[int] = []

    def populate(_address: int, _bytes: int) -> bool:
        transport.close()
        there.append(staging.untyped_storage().nbytes())
        return False

    monkeypatch.setattr(stream, "populate", populate)
    box = Box(0, 1, 0, 1)
    transport.prepare(TransferPlan(0, (Move(0, PARAMETER, box, 0, 1),), (), ()))
    assert there == [staging.numel()]
    assert staging.untyped_storage().nbytes() == 0
