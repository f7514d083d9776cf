"""Streaming through staging memory: what all transports share; only the wire differs.

A worker packs the boxes that it sends into a staging slot, and unpacks what has arrived in one;
while it does so, the messages of the other slots are on the wire. A message that is one run of
bytes in this worker's world goes straight from it, or into it; the other end need not know.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import DeadlineError, PlanError, TransferError
from liver_hpc.layout.tensors import Box, ModelSpec, TransferPlan
from liver_hpc.transport.base import StateView, TransferStats, Transport
from liver_hpc.transport.buckets import (
    Action,
    Piece,
    Placed,
    Step,
    check_budget,
    cut_moves,
    group_steps,
    plan_buckets,
    schedule,
    whole_units,
)


class Parcel(NamedTuple):
    """One message: to or from `peer` (a worker id), in `memory`, [bytes] of uint8."""

    peer: int
    tag: int
    memory: torch.Tensor
    is_send: bool

    def __str__(self) -> str:
        way = "to" if self.is_send else "from"
        return f"message {self.tag} of {self.memory.numel()} bytes {way} worker {self.peer}"


class Pending(Protocol):
    """Messages that have been started."""

    def wait(self, deadline: Deadline) -> None:
        """Returns when they have crossed; on CUDA, when the current stream waits for them.

        Raises TransferError or DeadlineError, which name the peer.
        """
        ...


class Wire(ABC):
    """Takes messages from one worker to another. Messages of a pair and direction keep order."""

    grouped: bool = False
    """True where the messages of a step run and complete as one, so that few large steps beat
    many small ones."""

    @abstractmethod
    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        """Starts all messages of a step; waits for none. Raises TransferError."""

    def streaming(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Encloses one stream; on leaving it, all copies have really been made."""
        return nullcontext()

    def abandon(self) -> None:  # noqa: B027 - nothing to do where handles clean up behind them
        """After a failure: what is under way must touch neither staging nor a world any more."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the backend; idempotent."""


def late(deadline: Deadline, messages: Parcel | str) -> DeadlineError:
    """The deadline's error, with what did not cross in time."""
    return DeadlineError(f"{deadline.error()}: not crossed: {messages}")


@dataclass(frozen=True)
class _Prepared:
    """A plan, cut. `messages` counts them by (sender, receiver)."""

    plan: TransferPlan
    steps: list[Step]
    local: list[tuple[Piece, ...]]
    messages: Counter[tuple[int, int]]


class StagedTransport(Transport):
    """A transport over any wire. Raises ConfigError when the budget holds no bucket."""

    def __init__(
        self, wire: Wire, model: ModelSpec, handoff: HandoffSection, device: torch.device
    ) -> None:
        check_budget(handoff.staging_bytes, handoff.bucket_bytes)
        self._wire = wire
        self._model = model
        self._bucket_bytes = whole_units(handoff.bucket_bytes)
        budget = whole_units(handoff.staging_bytes)
        halves = wire.grouped and budget >= 2 * self._bucket_bytes
        self.slot_bytes = whole_units(budget // 2) if halves else self._bucket_bytes
        self.num_slots = budget // self.slot_bytes
        # Zeros, not empty: the pages must be there before the pause.
        self._staging: torch.Tensor | None = torch.zeros(
            self.num_slots * self.slot_bytes, dtype=torch.uint8, device=device
        )
        self._prepared: list[_Prepared] = []
        self._tags: Counter[tuple[int, int]] = Counter()
        self._busy = threading.Lock()
        self._broken = self._closed = False

    def prepare(self, plan: TransferPlan) -> None:
        self._cut(plan)

    def _cut(self, plan: TransferPlan) -> _Prepared:
        for known in self._prepared:
            if known.plan == plan:
                return known
        size = self._model.element_bytes
        buckets = plan_buckets(plan, size, self._bucket_bytes)
        for move in plan.local:
            if not move.sender == move.receiver == plan.worker:
                raise PlanError(f"worker {plan.worker}: not a copy within this worker: {move}")
        prepared = _Prepared(
            plan,
            group_steps(buckets, self.slot_bytes),
            cut_moves(plan.local, size, self._bucket_bytes),
            Counter((bucket.sender, bucket.receiver) for bucket in buckets),
        )
        self._prepared.append(prepared)
        return prepared

    def stream(
        self,
        plan: TransferPlan,
        source: StateView | None,
        target: StateView | None,
        progress: Callable[[int], None],
        deadline: Deadline,
    ) -> TransferStats:
        if not self._busy.acquire(blocking=False):
            raise TransferError(f"worker {plan.worker}: this transport is streaming already")
        try:
            return self._stream(plan, _Worlds(source, target), progress, deadline)
        finally:
            self._busy.release()
            if self._closed:
                self._free_when_idle()

    def _stream(
        self,
        plan: TransferPlan,
        worlds: _Worlds,
        progress: Callable[[int], None],
        deadline: Deadline,
    ) -> TransferStats:
        staging = self._staging
        if self._broken or self._closed or staging is None:
            why = "closed" if self._closed else "broken by an earlier error"
            raise TransferError(f"worker {plan.worker}: the transport is {why}")
        prepared = self._cut(plan)
        slots = staging.view(self.num_slots, self.slot_bytes)
        stream = _Stream(self._wire, prepared, slots, _Ends(plan.worker, worlds, self._tags))
        self._broken = True
        try:
            with torch.no_grad(), self._wire.streaming(deadline):
                stats = stream.run(progress, deadline, lambda: self._closed)
            self._broken = False
        finally:
            if self._broken:
                stream.drop()
                self._wire.abandon()
        self._tags.update(prepared.messages)
        return stats

    def close(self) -> None:
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
        self._prepared.clear()
        self._busy.release()


class _Worlds(NamedTuple):
    source: StateView | None
    target: StateView | None


@dataclass(frozen=True)
class _Ends:
    """This worker and its two worlds; `tags` is where each pair's message numbers begin."""

    worker: int
    worlds: _Worlds
    tags: Counter[tuple[int, int]]


class _Copy(NamedTuple):
    """A piece in a world, and the same in staging."""

    view: torch.Tensor
    staged: torch.Tensor


class _Launched(NamedTuple):
    """A step on its way. `arriving`: bytes of state and copies to make, of every message here."""

    pending: Sequence[Pending]
    arriving: list[tuple[int, list[_Copy]]]


class _Stream:
    """One stream in progress. `slots` is the staging memory, [slots, slot bytes]."""

    def __init__(self, wire: Wire, prepared: _Prepared, slots: torch.Tensor, ends: _Ends) -> None:
        self._wire = wire
        self._prepared = prepared
        self._slots = slots
        self._ends = ends
        self._launched: deque[_Launched] = deque()
        self._sent = self._received = self._copied = 0
        self._pack_s = self._wire_s = self._unpack_s = self._local_s = 0.0

    def run(
        self, progress: Callable[[int], None], deadline: Deadline, closed: Callable[[], bool]
    ) -> TransferStats:
        began = time.perf_counter()
        local = iter(self._prepared.local)
        for action in schedule(self._prepared.steps, len(self._slots)):
            if closed():
                raise TransferError(f"worker {self._ends.worker}: the transport has been closed")
            if action.kind == "launch":
                self._launch(action)
            else:
                # Copies within the worker go where it would otherwise wait for the wire.
                self._copy_local(next(local, ()), progress)
                self._finish(progress, deadline)
        for pieces in local:
            deadline.check()
            self._copy_local(pieces, progress)
        return TransferStats(
            bytes_sent=self._sent,
            bytes_received=self._received,
            bytes_local=self._copied,
            pack_s=self._pack_s,
            wire_s=self._wire_s,
            unpack_s=self._unpack_s,
            local_s=self._local_s,
            total_s=time.perf_counter() - began,
        )

    def drop(self) -> None:
        """Forgets all unfinished messages: the backend's handles hold memory and connections."""
        self._launched.clear()

    def _launch(self, action: Action) -> None:
        began = time.perf_counter()
        parcels, arriving = [], []
        for placed in action.step:
            parcel, copies = self._parcel(action.slot, placed)
            parcels.append(parcel)
            if not parcel.is_send:
                arriving.append((placed.bucket.payload_bytes, copies))
                continue
            for view, staged in copies:
                staged.copy_(view, non_blocking=True)
            self._sent += placed.bucket.payload_bytes
        packed = time.perf_counter()
        self._launched.append(_Launched(self._wire.launch(parcels), arriving))
        self._pack_s += packed - began
        self._wire_s += time.perf_counter() - packed

    def _finish(self, progress: Callable[[int], None], deadline: Deadline) -> None:
        """The oldest launched step: its messages have crossed and are in their places."""
        began = time.perf_counter()
        for messages in self._launched[0].pending:
            messages.wait(deadline)
        arriving = self._launched.popleft().arriving
        arrived = time.perf_counter()
        for _, copies in arriving:
            for view, staged in copies:
                view.copy_(staged, non_blocking=True)
        self._wire_s += arrived - began
        self._unpack_s += time.perf_counter() - arrived
        num_bytes = sum(payload_bytes for payload_bytes, _ in arriving)
        if num_bytes:
            self._received += num_bytes
            progress(num_bytes)

    def _copy_local(self, pieces: Sequence[Piece], progress: Callable[[int], None]) -> None:
        began = time.perf_counter()
        num_bytes = 0
        for piece in pieces:
            to = self._view(self._ends.worlds.target, "target", piece)
            to.copy_(self._view(self._ends.worlds.source, "source", piece), non_blocking=True)
            num_bytes += piece.num_bytes
        self._local_s += time.perf_counter() - began
        if num_bytes:
            self._copied += num_bytes
            progress(num_bytes)

    def _parcel(self, slot: int, placed: Placed) -> tuple[Parcel, list[_Copy]]:
        """One message, and what has to be copied before it leaves or after it has arrived."""
        bucket, start = placed.bucket, placed.offset_bytes
        is_send = bucket.sender == self._ends.worker
        worlds = self._ends.worlds
        state, side = (worlds.source, "source") if is_send else (worlds.target, "target")
        views = [self._view(state, side, piece) for piece in bucket.pieces]
        copies: list[_Copy] = []
        if len(views) == 1 and views[0].is_contiguous() and views[0].nbytes == bucket.num_bytes:
            memory = views[0].view(-1).view(torch.uint8)
        else:
            memory = self._slots[slot, start : start + bucket.num_bytes]
            for piece, view in zip(bucket.pieces, views, strict=True):
                staged = memory[piece.offset_bytes : piece.offset_bytes + piece.num_bytes]
                copies.append(_Copy(view, staged.view(view.dtype).view(view.shape)))
        parcel = Parcel(
            peer=bucket.receiver if is_send else bucket.sender,
            tag=self._ends.tags[bucket.sender, bucket.receiver] + bucket.position,
            memory=memory,
            is_send=is_send,
        )
        return parcel, copies

    def _view(self, state: StateView | None, side: str, piece: Piece) -> torch.Tensor:
        """One piece of one world; raises PlanError where the world is not what the plan wants."""
        who = f"worker {self._ends.worker}"
        if state is None:
            raise PlanError(f"{who}: the plan wants {piece.kind} {piece.box}, no {side} world here")
        view = state.view(piece.kind, piece.tensor_index, piece.box)
        if view.shape != _shape(piece.box) or view.nbytes != piece.num_bytes:
            raise PlanError(
                f"{who}: {piece.kind} of tensor {piece.tensor_index} in the {side} world is "
                f"{tuple(view.shape)} of {view.dtype}, the plan wants {_shape(piece.box)} in "
                f"{piece.num_bytes} bytes"
            )
        return view


def _shape(box: Box) -> tuple[int, int]:
    return box.row1 - box.row0, box.col1 - box.col0
