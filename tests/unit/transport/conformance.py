"""What every transport must do; one class, inherited by the tests of each transport.

A scenario is a function of a `Member`, run by all workers at once: in threads for the in-memory
twin, in processes for a process group. It asserts what this worker can see.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import DeadlineError, LiverError, PlanError, TransferError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import move_bytes
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, Move, TransferPlan
from liver_hpc.transport.moved import Moved
from liver_hpc.transport.stream import Transport
from tests.unit.layout.models import TIED, UNTIED_BF16
from tests.unit.transport.plans import plan_of

MODELS = {"fp32": TIED, "bf16": UNTIED_BF16}
LARGE = HandoffSection(staging_bytes=1 << 16, bucket_bytes=1 << 12)
SMALL = HandoffSection(staging_bytes=700, bucket_bytes=200)
ONE_SLOT = HandoffSection(staging_bytes=256, bucket_bytes=256)
STAGED = HandoffSection(staging_bytes=700, bucket_bytes=200, direct=False)
BUDGETS = {"large": LARGE, "small": SMALL, "one slot": ONE_SLOT, "all staged": STAGED}
HANDOFFS = {
    "grow": (RankMap(Layout(1, 1, 2), (0, 1)), RankMap(Layout(2, 1, 2), (2, 0, 1, 3))),
    "turn": (RankMap(Layout(2, 1, 2), (0, 1, 2, 3)), RankMap(Layout(1, 2, 2), (3, 1, 0, 2))),
    "shrink": (RankMap(Layout(1, 4, 1), (0, 1, 2, 3)), RankMap(Layout(2, 1, 1), (3, 0))),
    "replace": (RankMap(Layout(1, 1, 2), (0, 1)), RankMap(Layout(1, 1, 2), (2, 1))),
}
SHORT_S, LONG_S = 0.3, 60.0


@dataclass
class Member:
    """One worker of a scenario. `connect` makes its transport; `depart` takes the connections
    down as a worker does that lives on; `meet` waits for all members."""

    worker: int
    connect: Callable[[ModelSpec, HandoffSection], Transport]
    depart: Callable[[], None]
    meet: Callable[[], Any]

    @staticmethod
    def deadline(limit_s: float = LONG_S) -> Deadline:
        return Deadline.after(SystemClock(), limit_s, "the bytes of the test")


class ToyState:
    """Whole tensors of which only some boxes are this worker's; the rest must never be touched.

    dtypes: parameters as wide as the model's, everything else fp32.
    """

    def __init__(self, model: ModelSpec, fill: Callable[[torch.Tensor], None]) -> None:
        self.memory: dict[tuple[str, int], torch.Tensor] = {}
        parameter = torch.float32 if model.main_is_parameter else torch.bfloat16
        for kind in (PARAMETER, *model.optimizer_kinds):
            for index, tensor in enumerate(model.tensors):
                dtype = parameter if kind == PARAMETER else torch.float32
                self.memory[kind, index] = torch.empty(tensor.rows, tensor.cols, dtype=dtype)
                fill(self.memory[kind, index])

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        return self.memory[kind, tensor_index][box.row0 : box.row1, box.col0 : box.col1]

    def bits(self, key: tuple[str, int]) -> torch.Tensor:
        tensor = self.memory[key]
        return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def random_bits(seed: int) -> Callable[[torch.Tensor], None]:
    """Fills with bit patterns, NaNs and negative zeros among them; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor) -> None:
        raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    return fill


def untouched(tensor: torch.Tensor) -> None:
    """Fills with a pattern that `random_bits` all but never makes."""
    tensor.view(torch.uint8).fill_(0xA5)


def _parts(plan: TransferPlan) -> list[TransferPlan]:
    """Parameters, then optimizer state, as a handoff streams them."""
    return [
        TransferPlan(plan.worker, *(
            tuple(m for m in moves if (m.kind == PARAMETER) == parameters)
            for moves in (plan.sends, plan.receives, plan.local)
        ))
        for parameters in (True, False)
    ]  # fmt: skip


def move_everything(member: Member, dtype: str, handoff: str, budget: str) -> list[Moved]:
    """A whole handoff in two streams, of which the second is acknowledged; every owned element
    arrives, no other is touched."""
    model, (source, target) = MODELS[dtype], HANDOFFS[handoff]
    transport = member.connect(model, BUDGETS[budget])
    plan = transfer_plan(model, source, target, member.worker)
    was, becomes = ToyState(model, random_bits(7)), ToyState(model, untouched)
    at, to = (rank_map.coordinate_of(member.worker) for rank_map in (source, target))
    streams: list[Moved] = []
    for part in _parts(plan):
        progress: list[int] = []
        moved = transport.stream(
            transport.prepare(part),
            None if at is None else was,
            None if to is None else becomes,
            progress.append,
            member.deadline(),
        )
        if streams:
            transport.acknowledge(transport.prepare(part), moved, member.deadline())
        lists = (part.sends, part.receives, part.local)
        sent, received, local = (move_bytes(model, moves) for moves in lists)
        assert sum(progress) == received + local
        if budget == "all staged":
            assert (moved.timings_s["pack"] > 0.0) == (sent > 0)
            assert (moved.timings_s["unpack"] > 0.0) == (received > 0)
        assert {key[0] for key in moved.sent} == {m.receiver for m in part.sends}
        streams.append(moved)
    wanted = ToyState(model, untouched)
    if to is not None:
        for kind, index in wanted.memory:
            for box in owned_boxes(model, target.layout, to, kind, index):
                wanted.view(kind, index, box).copy_(was.view(kind, index, box))
    for key in wanted.memory:
        assert torch.equal(becomes.bits(key), wanted.bits(key)), key
    member.meet()
    transport.close()
    return streams


def disagreements(moved: Sequence[Moved]) -> list[tuple[int, int, str]]:
    """(sender, receiver, kind) of which the two ends saw different bytes; moved: by worker."""
    sent = {
        (sender, receiver, kind): value
        for sender, one in enumerate(moved)
        for (receiver, kind), value in one.sent.items()
    }
    received = {
        (sender, receiver, kind): value
        for receiver, one in enumerate(moved)
        for (sender, kind), value in one.received.items()
    }
    return sorted(
        way for way in sent.keys() | received.keys() if sent.get(way) != received.get(way)
    )


def _states() -> tuple[ToyState, ToyState]:
    return ToyState(TIED, random_bits(1)), ToyState(TIED, untouched)


def _exchange(member: Member) -> TransferPlan:
    """Two workers send half of the parameters to each other."""
    moves = [
        Move(index, PARAMETER, tensor.whole, index % 2, 1 - index % 2)
        for index, tensor in enumerate(TIED.tensors)
    ]
    return plan_of(moves, member.worker)


def _chain(member: Member) -> TransferPlan:
    """Worker 1 sends to worker 0, and worker 0 other tensors to worker 2."""
    moves = [
        Move(index, PARAMETER, tensor.whole, 1 - index % 2, 2 * (index % 2))
        for index, tensor in enumerate(TIED.tensors)
    ]
    return plan_of(moves, member.worker)


@dataclass
class Failed:
    """How a stream ended."""

    error: LiverError
    text: str = field(init=False)
    after_s: float = 0.0

    def __post_init__(self) -> None:
        self.text = str(self.error)


def stream_failure(
    member: Member,
    transport: Transport,
    limit_s: float = LONG_S,
    plan_for: Callable[[Member], TransferPlan] = _exchange,
) -> Failed:
    """Streams, and must fail."""
    was, becomes = _states()
    began = time.monotonic()
    with pytest.raises(LiverError) as caught:
        transport.stream(
            transport.prepare(plan_for(member)),
            was,
            becomes,
            lambda _bytes: None,
            member.deadline(limit_s),
        )
    return Failed(caught.value, after_s=time.monotonic() - began)


def peer_leaves(member: Member) -> None:
    """A peer that closes its transport frees those that wait for it, who are told who it was."""
    transport = member.connect(TIED, SMALL)
    if member.worker == 1:
        transport.close()
        member.depart()
        return
    failed = stream_failure(member, transport)
    assert isinstance(failed.error, TransferError)
    assert "worker 1" in failed.text
    assert failed.after_s < LONG_S / 4
    again = stream_failure(member, transport)
    assert isinstance(again.error, TransferError)
    assert "broken by an earlier error" in again.text
    transport.close()
    transport.close()


def peer_is_silent(member: Member) -> None:
    """A peer that never comes: the deadline's error says for whom it waited."""
    transport = member.connect(TIED, SMALL)
    if member.worker == 0:
        failed = stream_failure(member, transport, SHORT_S)
        assert isinstance(failed.error, DeadlineError)
        assert "waited 0.3 s for the bytes of the test" in failed.text
        assert "worker 1" in failed.text
        assert SHORT_S <= failed.after_s < LONG_S / 4
    member.meet()
    transport.close()


class _TooWide(ToyState):
    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        return super().view(kind, tensor_index, box).double()


def state_does_not_fit(member: Member) -> None:
    """A state that is not what the plan says fails where it is, and frees the peer once closed."""
    transport = member.connect(TIED, SMALL)
    if member.worker == 0:
        failed = stream_failure(member, transport)
        assert isinstance(failed.error, TransferError)
    else:
        wrong, becomes = _TooWide(TIED, random_bits(1)), ToyState(TIED, untouched)
        prepared = transport.prepare(_exchange(member))
        with pytest.raises(PlanError, match=r"worker 1: parameter of tensor .* torch.float64"):
            transport.stream(prepared, wrong, becomes, lambda _bytes: None, member.deadline())
    transport.close()
    member.depart()


def worlds_are_missing(member: Member) -> None:
    """A plan that needs a world that is not there is refused."""
    transport = member.connect(TIED, SMALL)
    if member.worker == 0:
        _, becomes = _states()
        prepared = transport.prepare(_exchange(member))
        with pytest.raises(PlanError, match=r"worker 0: the plan wants .* no source world here"):
            transport.stream(prepared, None, becomes, lambda _bytes: None, member.deadline())
    member.meet()
    transport.close()


def progress_fails(member: Member) -> None:
    """An error of the caller's own passes through, and breaks the transport."""
    transport = member.connect(TIED, STAGED)
    was, becomes = _states()

    def fail(_bytes: int) -> None:
        raise ZeroDivisionError

    if member.worker == 1:
        assert "worker 0" in stream_failure(member, transport).text
    else:
        prepared = transport.prepare(_exchange(member))
        with pytest.raises(ZeroDivisionError):
            transport.stream(prepared, was, becomes, fail, member.deadline())
        assert "broken" in stream_failure(member, transport).text
    transport.close()
    member.depart()


def closed_is_closed(member: Member) -> None:
    transport = member.connect(TIED, SMALL)
    transport.close()
    failed = stream_failure(member, transport)
    assert isinstance(failed.error, TransferError)
    assert "the transport is closed" in failed.text


def copies_end_once_closed(member: Member) -> None:
    """Of a transport that has nothing to send or to receive, too."""
    alone = RankMap(Layout(1, 1, 1), (member.worker,))
    plan = transfer_plan(TIED, alone, alone, member.worker)
    assert plan.local
    assert not plan.sends + plan.receives
    transport = member.connect(TIED, SMALL)
    was, becomes = ToyState(TIED, random_bits(7)), ToyState(TIED, untouched)
    copied: list[int] = []

    def close(num_bytes: int) -> None:
        copied.append(num_bytes)
        transport.close()

    prepared, deadline = transport.prepare(plan), member.deadline()
    with pytest.raises(TransferError, match="the transport has been closed"):
        transport.stream(prepared, was, becomes, close, deadline)
    assert len(copied) == 1


def staging_is_freed(member: Member) -> None:
    """After an error and `close` staging is gone, even while the error and its traceback live."""
    transport: Any = member.connect(TIED, SMALL)
    if member.worker == 1:
        transport.close()
        member.depart()
        return
    storage = transport._staging.untyped_storage()
    failed = stream_failure(member, transport)
    transport.close()
    assert isinstance(failed.error, TransferError)
    assert storage.nbytes() == 0


def third_party_is_freed(member: Member) -> None:
    """Worker 0 fails because of worker 1. Once it has closed, worker 2, which has no business
    with worker 1, need not wait for its deadline: not even while worker 0 keeps the error.

    All passes staging: what lies in one piece would have left worker 0 before it fails."""
    transport = member.connect(TIED, STAGED)
    if member.worker == 1:
        transport.close()
        member.depart()
    else:
        failed = stream_failure(member, transport, plan_for=_chain)
        assert isinstance(failed.error, TransferError)
        assert f"worker {1 if member.worker == 0 else 0}" in failed.text
        transport.close()
        member.depart()
    member.meet()


class TransportConformance(ABC):
    """Inherit, and say how a scenario is run by several workers."""

    @abstractmethod
    def run(self, scenario: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        """`scenario(member, *arguments)` by every worker at once; the results by worker."""

    @pytest.mark.parametrize("budget", BUDGETS)
    @pytest.mark.parametrize("handoff", HANDOFFS)
    @pytest.mark.parametrize("dtype", MODELS)
    def test_every_box_arrives_bit_for_bit_and_nothing_else_is_touched(
        self, dtype: str, handoff: str, budget: str
    ) -> None:
        streams = self.run(move_everything, 4, dtype, handoff, budget)
        for moved in zip(*streams, strict=True):
            assert disagreements(moved) == []
            assert any(one.sent for one in moved)

    def test_a_peer_that_leaves_frees_those_that_wait_for_it(self) -> None:
        self.run(peer_leaves, 2)

    def test_a_failure_is_passed_on_to_those_who_wait_for_the_one_that_failed(self) -> None:
        self.run(third_party_is_freed, 3)

    def test_the_deadline_names_the_peer(self) -> None:
        self.run(peer_is_silent, 2)

    def test_a_state_that_does_not_fit_the_plan_is_refused(self) -> None:
        self.run(state_does_not_fit, 2)

    def test_a_plan_without_its_world_is_refused(self) -> None:
        self.run(worlds_are_missing, 2)

    def test_an_error_of_the_caller_breaks_the_transport(self) -> None:
        self.run(progress_fails, 2)

    def test_a_closed_transport_refuses(self) -> None:
        self.run(closed_is_closed, 2)

    def test_a_transport_that_is_closed_copies_no_more(self) -> None:
        self.run(copies_end_once_closed, 2)

    def test_staging_is_freed_while_the_error_lives(self) -> None:
        self.run(staging_is_freed, 2)
