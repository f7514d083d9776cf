"""Streaming the moves of a plan through staging memory.

A worker packs the boxes that it sends into a staging slot, and unpacks what has arrived in one;
while it does so, the messages of the other slots are on the wire. A message that is one run of
bytes in this worker's world goes straight from it, or into it; the other end need not know.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import torch

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import PlanError, TransferError
from liver_hpc.host.pages import populate
from liver_hpc.layout.tensors import Box, ModelSpec, TransferPlan
from liver_hpc.transport.buckets import (
    Bucket,
    Piece,
    Step,
    cut_moves,
    group_steps,
    plan_buckets,
    schedule,
    whole_units,
)
from liver_hpc.transport.digest import warm_up
from liver_hpc.transport.moved import Moved, Tally, Work, acknowledge
from liver_hpc.transport.wire import Parcel, Pending, Wire

_COMPARED_BYTES = 1 << 18
"""On a CPU a copy within the worker is compared in parts that are in the cache still."""

_KEPT_BACK = 8
"""This part of the budget is not slots: plan, messages and digests need memory too."""

Side = Literal["source", "target"]


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


class Transport:
    """Moves boxes between the workers of one handoff over a wire, within a bounded staging memory.

    The constructor allocates staging memory, whose pages come to be with `prepare`, and warms the
    digests up. After an error the transport is broken: it holds no unfinished work, refuses to
    stream, and wants to be closed.
    """

    def __init__(self, wire: Wire, model: ModelSpec, handoff: HandoffSection) -> None:
        self._wire = wire
        self._model = model
        self._bucket_bytes = whole_units(handoff.bucket_bytes)
        self._direct = handoff.direct
        budget = whole_units(handoff.staging_bytes - handoff.staging_bytes // _KEPT_BACK)
        budget = max(budget, min(whole_units(handoff.staging_bytes), 2 * self._bucket_bytes))
        halves = wire.grouped and budget >= 2 * self._bucket_bytes
        self.slot_bytes = whole_units(budget // 2) if halves else self._bucket_bytes
        self.num_slots = budget // self.slot_bytes
        self._staging: torch.Tensor | None = torch.empty(
            self.num_slots * self.slot_bytes, dtype=torch.uint8, device=wire.device
        )
        warm_up(model.tensors, wire.device)
        self._tags: Counter[tuple[int, int]] = Counter()
        self._busy = threading.Lock()
        self._broken = self._closed = False

    def prepare(
        self, plan: TransferPlan, source: StateView | None = None, target: StateView | None = None
    ) -> Prepared:
        """Cuts a plan into messages ahead of time: what `stream` takes. Not collective; while
        nothing is streamed.

        source, target: both worlds, where they stand already; then there is memory for messages
        that pass staging, else for all. Raises PlanError for a plan that is not this worker's.
        """
        size = self._model.element_bytes
        buckets = plan_buckets(plan, size, self._bucket_bytes)
        for move in plan.local:
            if not move.sender == move.receiver == plan.worker:
                raise PlanError(f"worker {plan.worker}: not a copy within this worker: {move}")
        steps = group_steps(buckets, self.slot_bytes)
        self._provide(steps, _Ends(plan.worker, source, target, self._direct))
        return Prepared(
            plan,
            steps,
            cut_moves(plan.local, size, self._bucket_bytes),
            Counter((bucket.sender, bucket.receiver) for bucket in buckets),
        )

    def _provide(self, steps: Iterable[Step], ends: _Ends) -> None:
        """Makes the pages of as many slots as these steps may need: of those that come first."""
        with self._using():
            staging = self._staging
            if staging is None or staging.is_cuda:
                return
            slots = len([*islice(filter(ends.may_stage, steps), self.num_slots)])
            used = staging[: slots * self.slot_bytes]
            if not populate(used.data_ptr(), used.nbytes):
                used.zero_()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Encloses what uses staging, which `close` leaves alone meanwhile. Raises TransferError
        where something else does."""
        if not self._busy.acquire(blocking=False):
            raise TransferError("this transport is streaming already")
        try:
            yield
        finally:
            self._busy.release()
            if self._closed:
                self._free_when_idle()

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
        is sent or copied, `target` where nothing arrives. digest: whether what is moved is digested
        at both ends.

        Raises TransferError when a peer or the backend fails, DeadlineError at the deadline (both
        name the peer), PlanError when the plan does not fit the state.
        """
        worker = prepared.plan.worker
        with self._using():
            staging = self._staging
            if self._broken or self._closed or staging is None:
                why = "closed" if self._closed else "broken by an earlier error"
                raise TransferError(f"worker {worker}: the transport is {why}")
            slots = staging.view(self.num_slots, self.slot_bytes).unbind()
            tally = Tally(self._model, digest=digest, late=self._wire.late)
            ends = _Ends(worker, source, target, self._direct)
            stream = _Stream(self._wire, prepared, ends, slots, self._tags, tally)
            self._broken = True
            try:
                with torch.no_grad(), self._wire.streaming(deadline):
                    stream.run(progress, deadline, lambda: self._closed)
                    tally.settle()
                self._broken = False
            finally:
                if self._broken:
                    stream.launched.clear()  # the backend's handles hold memory and connections
                    self._wire.abandon()
            self._tags.update(prepared.messages)
            return tally.moved()

    def acknowledge(self, prepared: Prepared, moved: Moved, deadline: Deadline) -> None:
        """After a stream with digests: returns once all receivers have said that they hold what was
        sent to them. Collective and errors: as `moved.acknowledge` has them."""
        acknowledge(self._wire, prepared.plan.worker, moved, deadline)

    def close(self) -> None:
        """Frees staging and lets go of the backend; idempotent, from any thread.

        Peers that still stream with this worker then fail promptly. A stream that runs in
        another thread of this process ends with an error at its next message or copy.
        """
        self._closed = True
        self._wire.close()
        self._free_when_idle()

    def _free_when_idle(self) -> None:
        """Gives staging back, whoever still refers to it (a traceback, say). While something uses
        it this does nothing: it is called at the end of that."""
        if not self._busy.acquire(blocking=False):
            return
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.untyped_storage().resize_(0)
        self._busy.release()


class _Message(NamedTuple):
    """One bucket as this worker has it.

    views: of its pieces, in this worker's world. memory: those views, where they are one run of
    bytes that crosses as it lies, [bytes] of uint8; None: it passes staging. staged: the views'
    counterparts there, once it is launched.
    """

    bucket: Bucket
    is_send: bool
    peer: int
    views: Sequence[torch.Tensor]
    memory: torch.Tensor | None
    staged: Sequence[torch.Tensor] = ()


class _Launched(NamedTuple):
    """A step on its way."""

    pending: Sequence[Pending]
    arriving: Sequence[_Message]


@dataclass(frozen=True)
class _Ends:
    """Both worlds as a worker has them, which a plan is for. direct: whether one run of bytes
    crosses as it lies."""

    worker: int
    source: StateView | None
    target: StateView | None
    direct: bool

    def may_stage(self, step: Step) -> bool:
        """Whether a message of the step passes staging, or its world is not there yet."""
        return any(
            self._state_of(bucket) is None or self.message(bucket).memory is None for bucket in step
        )

    def message(self, bucket: Bucket) -> _Message:
        is_send = bucket.sender == self.worker
        side: Side = "source" if is_send else "target"
        views = [self.view(side, piece) for piece in bucket.pieces]
        whole = self.direct and len(views) == 1 and bucket.pieces[0].num_bytes == bucket.num_bytes
        memory = views[0].view(-1).view(torch.uint8) if whole and views[0].is_contiguous() else None
        return _Message(
            bucket, is_send, bucket.receiver if is_send else bucket.sender, views, memory
        )

    def view(self, side: Side, piece: Piece) -> torch.Tensor:
        """One piece of one world; raises PlanError where the world is not what the plan wants."""
        state = self.source if side == "source" else self.target
        who = f"worker {self.worker}"
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

    def _state_of(self, bucket: Bucket) -> StateView | None:
        return self.source if bucket.sender == self.worker else self.target


@dataclass
class _Stream:
    """One stream in progress.

    slots: the staging memory, a tensor of bytes a slot. tags: where each pair's message numbers
    begin.
    """

    wire: Wire
    prepared: Prepared
    ends: _Ends
    slots: Sequence[torch.Tensor]
    tags: Counter[tuple[int, int]]
    tally: Tally
    launched: deque[_Launched] = field(default_factory=deque)
    upcoming: list[_Message] = field(default_factory=list)

    def run(
        self, progress: Callable[[int], None], deadline: Deadline, closed: Callable[[], bool]
    ) -> None:
        def check_open() -> None:
            if closed():
                worker = self.prepared.plan.worker
                raise TransferError(f"worker {worker}: the transport has been closed")

        local = iter(self.prepared.local)
        for action in schedule(self.prepared.steps, len(self.slots), self._needs_slot):
            check_open()
            if action.kind == "launch":
                self._launch(action.slot)
            else:
                # Copies within the worker go where it would otherwise wait for the wire.
                self._copy_local(next(local, ()), progress)
                self._finish(progress, deadline)
        for pieces in local:
            check_open()
            deadline.check()
            self._copy_local(pieces, progress)

    def _needs_slot(self, step: Step) -> bool:
        """Whether a message of the step that comes next has to pass staging."""
        self.upcoming = [self.ends.message(bucket) for bucket in step]
        return any(message.memory is None for message in self.upcoming)

    def _launch(self, slot: int | None) -> None:
        """Starts the upcoming messages, and packs them first where they pass the slot."""
        parcels, arriving, offset_bytes = [], [], 0
        for message in self.upcoming:
            bucket, memory = message.bucket, message.memory
            if memory is None:
                assert slot is not None
                memory = self.slots[slot][offset_bytes : offset_bytes + bucket.num_bytes]
                offset_bytes += bucket.num_bytes
                message = message._replace(staged=_staged(message, memory))
            if not message.is_send:
                arriving.append(message)
            elif message.staged:
                self.tally.see("sent", message.peer, bucket.pieces, message.views)
                self._copy("pack", message.views, message.staged)
            tag = self.tags[bucket.sender, bucket.receiver] + bucket.position
            parcels.append(Parcel(message.peer, tag, memory, message.is_send))
        self.launched.append(_Launched(self.wire.launch(parcels), arriving))
        for message in self.upcoming:
            if message.is_send and message.memory is not None:
                self.tally.see("sent", message.peer, message.bucket.pieces, message.views)

    def _finish(self, progress: Callable[[int], None], deadline: Deadline) -> None:
        """The oldest launched step: its messages have crossed and are in their places."""
        with self.tally.timed("wire"):
            for messages in self.launched[0].pending:
                messages.wait(deadline)
        for message in self.launched.popleft().arriving:
            if message.staged:
                self._copy("unpack", message.staged, message.views)
            self.tally.see("received", message.peer, message.bucket.pieces, message.views)
            progress(message.bucket.payload_bytes)

    def _copy_local(self, pieces: Sequence[Piece], progress: Callable[[int], None]) -> None:
        if not pieces:
            return
        for piece in pieces:
            source = self.ends.view("source", piece)
            target = self.ends.view("target", piece)
            rows = len(source)
            if not source.is_cuda:
                rows = max(1, _COMPARED_BYTES * rows // source.nbytes)
            parts = torch.split(source, rows), torch.split(target, rows)
            for one, other in zip(*parts, strict=True):
                self._copy("copy", [one], [other])
                self.tally.compare(piece.kind, one, other)
        progress(sum(piece.num_bytes for piece in pieces))

    def _copy(
        self, work: Work, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        with self.tally.timed(work):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)


def _staged(message: _Message, memory: torch.Tensor) -> list[torch.Tensor]:
    """The pieces of a message in its staging memory, of the shapes and types of its views."""
    staged = []
    for piece, view in zip(message.bucket.pieces, message.views, strict=True):
        flat = memory[piece.offset_bytes : piece.offset_bytes + piece.num_bytes]
        staged.append(flat.view(view.dtype).view(view.shape))
    return staged
