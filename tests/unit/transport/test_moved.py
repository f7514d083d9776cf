"""The digests of what crosses: both ends agree, and a bit that flips is found where it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import TransferError
from liver_hpc.layout.tensors import EXP_AVG, PARAMETER, Box, ModelSpec, Move, TensorSpec
from liver_hpc.transport.buckets import Piece
from liver_hpc.transport.digest import MODULUS, box_digest
from liver_hpc.transport.moved import Moved, Tally
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import Parcel, Pending, Wire
from tests.unit.transport.conformance import Member, ToyState, disagreements, random_bits
from tests.unit.transport.memory import MemoryExchange
from tests.unit.transport.plans import RandomPlans, plan_of, random_plans
from tests.unit.transport.test_memory import in_threads

HANDOFF = HandoffSection(staging_bytes=1024, bucket_bytes=512)
MODEL = ModelSpec(
    tuple(TensorSpec(name, (8, 8)) for name in "abc"), {"pp1": (((0, 1, 2),),)}, parameter_bytes=4
)
LEFT, TOP = Box(0, 8, 0, 4), Box(0, 4, 0, 8)
MOVES = [
    Move(0, PARAMETER, LEFT, 0, 1),
    Move(1, PARAMETER, TOP, 0, 1),
    Move(1, PARAMETER, LEFT, 1, 0),
    Move(2, PARAMETER, LEFT, 1, 1),
    Move(0, EXP_AVG, LEFT, 0, 1),
    Move(1, EXP_AVG, TOP, 1, 0),
]
"""Columns, which pass staging, and whole rows, which do not, both ways; and a copy."""
UNSTAGED = (1, 0, EXP_AVG)
"""Goes as it lies: whether it crosses with a bit that flips late is chance."""


def flip(memory: torch.Tensor) -> None:
    """One bit of the first element, whatever its type; of a view of any strides."""
    memory[(slice(0, 1),) * memory.dim()].view(torch.uint8)[..., :1] ^= 4


class _FaultyWire(Wire):
    """Flips a bit of the one message that is chosen: before it leaves, or once it has crossed."""

    device = torch.device("cpu")

    def __init__(self, wire: Wire, chosen: Callable[[Parcel], bool]) -> None:
        self._wire = wire
        self._chosen = chosen

    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        for parcel in parcels:
            if parcel.is_send and self._chosen(parcel):
                flip(parcel.memory)
        started = self._wire.launch(parcels)
        return [
            pending if parcel.is_send or not self._chosen(parcel) else _Faulty(pending, parcel)
            for parcel, pending in zip(parcels, started, strict=True)
        ]

    def close(self) -> None:
        self._wire.close()


class _Faulty:
    def __init__(self, pending: Pending, parcel: Parcel) -> None:
        self._pending = pending
        self._parcel = parcel

    def wait(self, deadline: Deadline) -> None:
        self._pending.wait(deadline)
        flip(self._parcel.memory)


_HERE = threading.local()
"""worker: whose thread this is."""


def _stream(
    member: Member, exchange: MemoryExchange, chosen: Callable[[int, Parcel], bool]
) -> Moved:
    _HERE.worker = member.worker
    wire = exchange.wire(member.worker)
    faulty = _FaultyWire(wire, lambda parcel: chosen(member.worker, parcel))
    transport = Transport(faulty, MODEL, HANDOFF)
    was, becomes = (ToyState(MODEL, random_bits(seed)) for seed in (3, 4))
    prepared = transport.prepare(plan_of(MOVES, member.worker))
    return transport.stream(prepared, was, becomes, lambda _bytes: None, member.deadline())


def _streamed(
    chosen: Callable[[int, Parcel], bool] = lambda _worker, _parcel: False,
) -> list[Moved]:
    return in_threads(_stream, 2, MemoryExchange(), chosen)


@pytest.fixture(params=[False, True], ids=["host", "late device"])
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has digests of its own."""
    monkeypatch.setattr(_FaultyWire, "late", request.param)


WAYS = sorted({(m.sender, m.receiver, m.kind) for m in MOVES if m.sender != m.receiver})


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(
    ("where", "sender", "tag", "kind"),
    [
        ("in staging", 0, 0, EXP_AVG),
        ("in staging", 0, 1, PARAMETER),
        ("in staging", 1, 1, PARAMETER),
        ("on the wire", 0, 0, EXP_AVG),
        ("on the wire", 0, 1, PARAMETER),
        ("on the wire, unstaged", 0, 2, PARAMETER),
        ("on the wire, unstaged", 1, 0, EXP_AVG),
        ("on the wire", 1, 1, PARAMETER),
    ],
)
def test_a_bit_that_flips_in_a_message_is_found_at_its_pair_and_kind(
    where: str, sender: int, tag: int, kind: str
) -> None:
    is_send = where == "in staging"

    def chosen(worker: int, parcel: Parcel) -> bool:
        from_worker = worker if parcel.is_send else parcel.peer
        return (from_worker, parcel.tag, parcel.is_send) == (sender, tag, is_send)

    assert disagreements(_streamed(chosen)) == [(sender, 1 - sender, kind)]


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(
    ("way", "sender", "receiver", "kind"),
    [("sent", *ends) for ends in WAYS if ends != UNSTAGED] + [("received", *ends) for ends in WAYS],
)
def test_a_bit_that_flips_in_a_world_is_found_at_its_pair_and_kind(
    way: str, sender: int, receiver: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the source before it is packed, or in the target once it was unpacked."""
    see, flipped = Tally.see, list[Sequence[Piece]]()

    def faulty(
        self: Tally, end: str, peer: int, pieces: Sequence[Piece], views: Sequence[torch.Tensor]
    ) -> None:
        ends = (_HERE.worker, peer) if end == "sent" else (peer, _HERE.worker)
        chosen = (end, *ends, pieces[0].kind) == (way, sender, receiver, kind) and not flipped
        if chosen and way == "received":
            flip(views[0])
        see(self, end, peer, pieces, views)
        if chosen and way == "sent":
            flip(views[0])
        flipped.extend([pieces] * chosen)

    monkeypatch.setattr(Tally, "see", faulty)
    assert disagreements(_streamed()) == [(sender, receiver, kind)]
    assert flipped


@pytest.mark.usefixtures("_device")
def test_nothing_disagrees_where_nothing_flips() -> None:
    moved = _streamed()
    assert disagreements(moved) == []
    assert [sorted(one.sent) for one in moved] == [
        [(1, EXP_AVG), (1, PARAMETER)], [(0, EXP_AVG), (0, PARAMETER)],
    ]  # fmt: skip


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_bit_that_flips_in_a_copy_within_a_worker_is_found(
    end: str, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Tally.compare

    def faulty(self: Tally, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
        spoilt = source if end == "source" else target
        spoilt[-1:, -1:].view(torch.uint8)[..., -1:] ^= bit  # 128: the sign of a number
        compare(self, kind, source, target)

    monkeypatch.setattr(Tally, "compare", faulty)
    with pytest.raises(TransferError, match=r"copies of \['parameter'\] within the worker differ"):
        _streamed()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("late", [False, True])
def test_copies_are_compared_by_their_bits(dtype: torch.dtype, late: bool) -> None:
    """NaN differs from itself as a number, 0.0 and -0.0 do not."""
    ones = torch.full((3, 8), 255, dtype=torch.uint8).view(dtype)
    zeros, negative = torch.zeros(3, 8, dtype=dtype), torch.zeros(3, 8, dtype=dtype)
    negative.view(torch.uint8)[1, -1] = 128
    tally = Tally(MODEL, digest=True, late=late)
    tally.compare(PARAMETER, ones, ones.clone())
    tally.compare(PARAMETER, negative[:, 1:], negative.clone()[:, 1:])
    tally.settle()
    assert tally.moved().sent == {}
    tally.compare(PARAMETER, zeros, negative)
    tally.compare(PARAMETER, zeros, zeros.clone())
    tally.settle()
    with pytest.raises(TransferError):
        tally.moved()


def _random(member: Member, case: RandomPlans, handoff: HandoffSection) -> Moved:
    transport = member.connect(case.model, handoff)
    was, becomes = (ToyState(case.model, random_bits(seed)) for seed in (3, 4))
    prepared = transport.prepare(case.plans[member.worker])
    return transport.stream(prepared, was, becomes, lambda _bytes: None, member.deadline())


@settings(max_examples=20)
@given(random_plans(), st.integers(16, 300), st.integers(0, 900), st.booleans())
def test_both_ends_agree_whatever_moves_in_whatever_pieces(
    case: RandomPlans, bucket_bytes: int, more_bytes: int, grouped: bool
) -> None:
    """On a late device digests are those of the boxes however these were cut."""
    handoff = HandoffSection(staging_bytes=bucket_bytes + more_bytes, bucket_bytes=bucket_bytes)
    moved = in_threads(_random, len(case.plans), case, handoff, grouped=grouped)
    assert disagreements(moved) == []
    was = ToyState(case.model, random_bits(3))
    wanted: dict[tuple[int, int, str], int] = {}
    for index, kind, box, sender, receiver in case.moves:
        if sender == receiver:
            continue
        way = (sender, receiver, kind)
        share = box_digest(was.view(kind, index, box), case.model.tensors[index], box)
        wanted[way] = (wanted.get(way, 0) + share) % MODULUS
    found = {
        (sender, receiver, kind): value
        for sender, one in enumerate(moved)
        for (receiver, kind), value in one.sent.items()
    }
    assert found.keys() == wanted.keys()
    assert found == wanted or not grouped


def _undigested(member: Member, moves: Sequence[Move]) -> Moved:
    transport = member.connect(MODEL, HANDOFF)
    was, becomes = (ToyState(MODEL, random_bits(seed)) for seed in (3, 4))
    plan = plan_of(moves, member.worker)
    return transport.stream(
        transport.prepare(plan), was, becomes, lambda _bytes: None, member.deadline(), digest=False
    )


def test_digests_can_be_left_out_and_seconds_are_counted_all_the_same() -> None:
    for moved in in_threads(_undigested, 2, MOVES):
        assert (moved.sent, moved.received) == ({}, {})
        assert moved.timings_s["digest"] == 0.0
        assert min(moved.timings_s[work] for work in ("wire", "pack", "unpack")) > 0.0


def test_whole_rows_do_not_pass_staging() -> None:
    for moved in in_threads(_undigested, 2, [move for move in MOVES if move.box == TOP]):
        assert moved.timings_s["wire"] > 0.0
        assert moved.timings_s["pack"] == moved.timings_s["unpack"] == 0.0
