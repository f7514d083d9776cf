"""Streaming the moves of a plan through staging memory.

A worker packs the boxes that it sends into a staging slot, and unpacks what has arrived in one;
while it does so, the messages of the other slots are on the wire. A message that is one run of
bytes in this worker's world goes straight from it, or into it; the other end need not know.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import PlanError, TransferError
from liver_hpc.layout.tensors import Box, ModelSpec, TransferPlan
from liver_hpc.transport.buckets import (
    Action,
    Bucket,
    Piece,
    Step,
    cut_moves,
    group_steps,
    plan_buckets,
    schedule,
    whole_units,
)
from liver_hpc.transport.digest import MODULUS, box_digest
from liver_hpc.transport.wire import Parcel, Pending, Wire


class StateView(Protocol):
    """One world's state on one worker, seen through global boxes."""

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """The memory of one global box, strided, [box rows, box cols]; writes go to the world.

        Raises PlanError when this worker does not hold the whole box.
        """
        ...


@dataclass(frozen=True)
class Prepared:
    """A worker's plan, cut into messages. messages: how many, by (sender, receiver)."""

    plan: TransferPlan
    steps: Sequence[Step]
    local: Sequence[tuple[Piece, ...]]
    messages: Counter[tuple[int, int]]


@dataclass
class TransferStats:
    """Where the seconds of a stream went: "wire" is waiting for messages."""

    timings_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """What crossed, as digests modulo 2**64 by (the worker at the other end, kind of state); what
    was copied within this worker stands under its own id in both."""

    sent: Mapping[tuple[int, str], int]
    received: Mapping[tuple[int, str], int]
    stats: TransferStats


class Transport:
    """Moves boxes between the workers of one handoff over a wire, within a bounded staging memory.

    The constructor allocates and touches all staging memory. After an error the transport is
    broken: it holds no unfinished work, refuses to stream, and wants to be closed.
    """

    def __init__(self, wire: Wire, model: ModelSpec, handoff: HandoffSection) -> None:
        self._wire = wire
        self._model = model
        self._bucket_bytes = whole_units(handoff.bucket_bytes)
        budget = whole_units(handoff.staging_bytes)
        halves = wire.grouped and budget >= 2 * self._bucket_bytes
        self.slot_bytes = whole_units(budget // 2) if halves else self._bucket_bytes
        self.num_slots = budget // self.slot_bytes
        # Zeros, not empty: the pages must be there before the pause.
        self._staging: torch.Tensor | None = torch.zeros(
            self.num_slots * self.slot_bytes, dtype=torch.uint8, device=wire.device
        )
        self._tags: Counter[tuple[int, int]] = Counter()
        self._busy = threading.Lock()
        self._broken = self._closed = False

    def prepare(self, plan: TransferPlan) -> Prepared:
        """Cuts a plan into messages ahead of time: what `stream` takes. Not collective.

        Raises PlanError for a plan that is not this worker's.
        """
        size = self._model.element_bytes
        buckets = plan_buckets(plan, size, self._bucket_bytes)
        for move in plan.local:
            if not move.sender == move.receiver == plan.worker:
                raise PlanError(f"worker {plan.worker}: not a copy within this worker: {move}")
        return Prepared(
            plan,
            group_steps(buckets, self.slot_bytes),
            cut_moves(plan.local, size, self._bucket_bytes),
            Counter((bucket.sender, bucket.receiver) for bucket in buckets),
        )

    def stream(
        self,
        prepared: Prepared,
        source: StateView | None,
        target: StateView | None,
        progress: Callable[[int], None],
        deadline: Deadline,
        *,
        digest: bool = True,
    ) -> Moved:
        """Sends, receives and copies all moves of a plan, in the order of its lists.

        Collective over the workers that the plan's moves name: each streams its own plan. Calls
        `progress(num_bytes)` from this thread as state arrives or is copied, never for what is
        sent: summed over all workers, every byte counts once. `source` may be None where nothing
        is sent or copied, `target` where nothing arrives.

        Raises TransferError when a peer or the backend fails, DeadlineError at the deadline (both
        name the peer), PlanError when the plan does not fit the state.
        """
        worker = prepared.plan.worker
        if not self._busy.acquire(blocking=False):
            raise TransferError(f"worker {worker}: this transport is streaming already")
        try:
            staging = self._staging
            if self._broken or self._closed or staging is None:
                why = "closed" if self._closed else "broken by an earlier error"
                raise TransferError(f"worker {worker}: the transport is {why}")
            slots = staging.view(self.num_slots, self.slot_bytes)
            stream = _Stream(self._wire, prepared, slots, source, target, self._tags)
            self._broken = True
            try:
                with torch.no_grad(), self._wire.streaming(deadline):
                    stream.run(progress, deadline, lambda: self._closed)
                self._broken = False
            finally:
                if self._broken:
                    stream.launched.clear()  # the backend's handles hold memory and connections
                    self._wire.abandon()
            self._tags.update(prepared.messages)
            return stream.moved(self._model) if digest else Moved({}, {}, TransferStats())
        finally:
            self._busy.release()
            if self._closed:
                self._free_when_idle()

    def close(self) -> None:
        """Frees staging and lets go of the backend; idempotent, from any thread.

        Peers that still stream with this worker then fail promptly. A stream that runs in
        another thread of this process ends with an error at its next message.
        """
        self._closed = True
        self._wire.close()
        self._free_when_idle()

    def _free_when_idle(self) -> None:
        """Gives staging back, whoever still refers to it (a traceback, say). While a stream runs
        this does nothing: the stream calls it at its end."""
        if not self._busy.acquire(blocking=False):
            return
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.untyped_storage().resize_(0)
        self._busy.release()


class _Copy(NamedTuple):
    """A piece in a world, and the same in staging."""

    view: torch.Tensor
    staged: torch.Tensor


class _Launched(NamedTuple):
    """A step on its way. arriving: copies to make once its messages have crossed; num_bytes: of
    state in what arrives."""

    pending: Sequence[Pending]
    arriving: list[_Copy]
    num_bytes: int


@dataclass
class _Stream:
    """One stream in progress.

    slots: the staging memory, [slots, slot bytes]. tags: where each pair's message numbers begin.
    """

    wire: Wire
    prepared: Prepared
    slots: torch.Tensor
    source: StateView | None
    target: StateView | None
    tags: Counter[tuple[int, int]]
    launched: deque[_Launched] = field(default_factory=deque)

    def run(
        self, progress: Callable[[int], None], deadline: Deadline, closed: Callable[[], bool]
    ) -> None:
        local = iter(self.prepared.local)
        for action in schedule(self.prepared.steps, len(self.slots)):
            if closed():
                worker = self.prepared.plan.worker
                raise TransferError(f"worker {worker}: the transport has been closed")
            if action.kind == "launch":
                self._launch(action)
            else:
                # Copies within the worker go where it would otherwise wait for the wire.
                self._copy_local(next(local, ()), progress)
                self._finish(progress, deadline)
        for pieces in local:
            deadline.check()
            self._copy_local(pieces, progress)

    def _launch(self, action: Action) -> None:
        parcels: list[Parcel] = []
        arriving: list[_Copy] = []
        num_bytes = 0
        rest = self.slots[action.slot]
        for bucket in action.step:
            parcel, copies = self._parcel(bucket, rest[: bucket.num_bytes])
            rest = rest[bucket.num_bytes :]
            parcels.append(parcel)
            if parcel.is_send:
                for view, staged in copies:
                    staged.copy_(view, non_blocking=True)
            else:
                arriving += copies
                num_bytes += bucket.payload_bytes
        self.launched.append(_Launched(self.wire.launch(parcels), arriving, num_bytes))

    def _finish(self, progress: Callable[[int], None], deadline: Deadline) -> None:
        """The oldest launched step: its messages have crossed and are in their places."""
        for messages in self.launched[0].pending:
            messages.wait(deadline)
        step = self.launched.popleft()
        for view, staged in step.arriving:
            view.copy_(staged, non_blocking=True)
        if step.num_bytes:
            progress(step.num_bytes)

    def _copy_local(self, pieces: Sequence[Piece], progress: Callable[[int], None]) -> None:
        num_bytes = 0
        for piece in pieces:
            to = self._view(self.target, "target", piece)
            to.copy_(self._view(self.source, "source", piece), non_blocking=True)
            num_bytes += piece.num_bytes
        if num_bytes:
            progress(num_bytes)

    def _parcel(self, bucket: Bucket, staging: torch.Tensor) -> tuple[Parcel, list[_Copy]]:
        """One message, and what has to be copied before it leaves or after it has arrived."""
        is_send = bucket.sender == self.prepared.plan.worker
        state, side = (self.source, "source") if is_send else (self.target, "target")
        views = [self._view(state, side, piece) for piece in bucket.pieces]
        copies: list[_Copy] = []
        if len(views) == 1 and views[0].is_contiguous() and views[0].nbytes == bucket.num_bytes:
            memory = views[0].view(-1).view(torch.uint8)
        else:
            memory = staging
            for piece, view in zip(bucket.pieces, views, strict=True):
                staged = memory[piece.offset_bytes : piece.offset_bytes + piece.num_bytes]
                copies.append(_Copy(view, staged.view(view.dtype).view(view.shape)))
        parcel = Parcel(
            peer=bucket.receiver if is_send else bucket.sender,
            tag=self.tags[bucket.sender, bucket.receiver] + bucket.position,
            memory=memory,
            is_send=is_send,
        )
        return parcel, copies

    def moved(self, model: ModelSpec) -> Moved:
        """The digests of all that was moved."""
        sent: Counter[tuple[int, str]] = Counter()
        received: Counter[tuple[int, str]] = Counter()
        me = self.prepared.plan.worker
        buckets = [b for step in self.prepared.steps for b in step]
        for pieces, sender, receiver in (
            *((b.pieces, b.sender, b.receiver) for b in buckets),
            *((pieces, me, me) for pieces in self.prepared.local),
        ):
            for piece in pieces:
                name = model.tensors[piece.tensor_index].name
                if sender == me:
                    view = self._view(self.source, "source", piece)
                    sent[receiver, piece.kind] += box_digest(view, name, piece.box)
                if receiver == me:
                    view = self._view(self.target, "target", piece)
                    received[sender, piece.kind] += box_digest(view, name, piece.box)
        return Moved(
            {key: value % MODULUS for key, value in sent.items()},
            {key: value % MODULUS for key, value in received.items()},
            TransferStats(),
        )

    def _view(self, state: StateView | None, side: str, piece: Piece) -> torch.Tensor:
        """One piece of one world; raises PlanError where the world is not what the plan wants."""
        who = f"worker {self.prepared.plan.worker}"
        if state is None:
            raise PlanError(f"{who}: the plan wants {piece.kind} {piece.box}, no {side} world here")
        view = state.view(piece.kind, piece.tensor_index, piece.box)
        if view.shape != piece.box.shape or view.nbytes != piece.num_bytes:
            raise PlanError(
                f"{who}: {piece.kind} of tensor {piece.tensor_index} in the {side} world is "
                f"{tuple(view.shape)} of {view.dtype}, the plan wants {piece.box.shape} in "
                f"{piece.num_bytes} bytes"
            )
        return view
