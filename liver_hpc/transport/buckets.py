"""How the moves of a plan become messages, and in which order they cross. Pure: no torch.

Every pair (sender, receiver) cuts its list of moves into buckets of at most `bucket_bytes`, both
ends alone and alike. All buckets of all workers have one global order, `Bucket.key`. A worker
takes its own buckets, those it sends and those it receives, in that order, packs neighbours into
steps of at most one staging slot, and goes through `schedule(steps, num_slots, needs_slot)`: launch
a step, which starts all its messages at once and waits for none, or finish the oldest launched
step, which waits for its messages and frees its slot. At most `num_slots` steps that need a slot
are between the two; a step whose messages lie in the worker's own tensors needs none.

Why this cannot deadlock, whatever the plan, for any `num_slots` >= 1, and whoever needs slots for
what. Suppose that nobody makes progress, and let b be the smallest bucket of all that has not
crossed. At either end of b, every bucket before b has crossed, so every step before the one with b
can be finished, its slot is free, and the step with b has been launched. Both ends have therefore
started b, and nothing that is started waits for anything but its other end: b crosses, a
contradiction. The argument needs no bound on how far the workers drift apart, and it holds too
where a backend completes a step only as a whole (NCCL groups): all of the steps before b's lie
before b.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Box, Move, TransferPlan

ALIGNMENT_BYTES = 16
"""Every piece starts at a multiple of it, so that staging can be seen as any element type."""
ALONE_SHARE = 1 / 8
"""From this share of a bucket on, a move is worth messages of its own."""


class Piece(NamedTuple):
    """A part of one move inside a bucket; `offset_bytes` counts from the bucket's start."""

    kind: str
    tensor_index: int
    box: Box
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message from `sender` to `receiver`: the `position`-th of this pair."""

    position: int
    sender: int
    receiver: int
    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """The global order: by place in the pair's list, then pair.

        Places first, so that all pairs advance alike and a worker sends and receives at the same
        time. Among equal places, by receiver - sender: everyone's partner is different.
        """
        return self.position, self.receiver - self.sender, self.sender

    @property
    def payload_bytes(self) -> int:
        """Bytes of state in it: without the gaps that alignment leaves."""
        return sum(piece.num_bytes for piece in self.pieces)


Step = tuple[Bucket, ...]
"""Buckets that lie one behind the other in a staging slot."""


class Action(NamedTuple):
    """What to do next with a step. slot: the staging slot that it occupies; None: it needs none."""

    kind: Literal["launch", "finish"]
    slot: int | None
    step: Step


def aligned(num_bytes: int) -> int:
    """Rounded up to a multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def whole_units(num_bytes: int) -> int:
    """Rounded down to a multiple of ALIGNMENT_BYTES."""
    return num_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def cut_moves(
    moves: Iterable[Move], element_bytes: Callable[[str, int], int], bucket_bytes: int
) -> list[tuple[Piece, ...]]:
    """The pieces of each bucket that the moves of one pair fill, in the moves' order.

    Small moves share buckets, and one is filled before the next is begun. A move of at least
    ALONE_SHARE of a bucket has buckets to itself: where its memory is one run of bytes, nothing
    need be packed. A move that does not fit is cut by rows, and a row that is larger than a whole
    bucket by columns.
    """
    capacity_bytes = room_bytes = whole_units(bucket_bytes)
    buckets: list[list[Piece]] = [[]]
    before_alone = False
    for move in moves:
        size = element_bytes(move.kind, move.tensor_index)
        alone = move.box.elements * size >= capacity_bytes * ALONE_SHARE
        if alone or before_alone:
            buckets.append([])
            room_bytes = capacity_bytes
        before_alone = alone
        rest = [move.box]
        while rest:
            box = rest.pop()
            part, later = _fit(box, size, room_bytes, whole_bucket=not buckets[-1])
            if part is None:
                buckets.append([])
                room_bytes = capacity_bytes
                rest.append(box)
                continue
            piece = Piece(
                move.kind,
                move.tensor_index,
                part,
                capacity_bytes - room_bytes,
                part.elements * size,
            )
            buckets[-1].append(piece)
            room_bytes -= aligned(piece.num_bytes)
            rest.extend(reversed(later))
    return [tuple(bucket) for bucket in buckets if bucket]


def _fit(
    box: Box, element_bytes: int, room_bytes: int, *, whole_bucket: bool
) -> tuple[Box | None, tuple[Box, ...]]:
    """The first part of `box` that fits into the room, and what is left; None when none does."""
    row_elements = box.col1 - box.col0
    rows = room_bytes // (row_elements * element_bytes)
    if rows >= box.row1 - box.row0:
        return box, ()
    if rows:
        middle = box.row0 + rows
        return box._replace(row1=middle), (box._replace(row0=middle),)
    if not whole_bucket:
        return None, ()
    middle = box.col0 + room_bytes // element_bytes
    first_row = box._replace(row1=box.row0 + 1)
    left, right = first_row._replace(col1=middle), first_row._replace(col0=middle)
    below = box._replace(row0=box.row0 + 1)
    return left, (right, below) if below.row0 < below.row1 else (right,)


def plan_buckets(
    plan: TransferPlan, element_bytes: Callable[[str, int], int], bucket_bytes: int
) -> list[Bucket]:
    """All buckets that one worker sends or receives, by key.

    Raises PlanError for a move that is not this worker's.
    """
    pairs: dict[tuple[int, int], list[Move]] = {}
    for move in (*plan.sends, *plan.receives):
        if plan.worker not in (move.sender, move.receiver) or move.sender == move.receiver:
            raise PlanError(f"worker {plan.worker}: this is not mine to move: {move}")
        pairs.setdefault((move.sender, move.receiver), []).append(move)
    buckets = []
    for (sender, receiver), between in pairs.items():
        for position, pieces in enumerate(cut_moves(between, element_bytes, bucket_bytes)):
            num_bytes = aligned(pieces[-1].offset_bytes + pieces[-1].num_bytes)
            buckets.append(Bucket(position, sender, receiver, pieces, num_bytes))
    return sorted(buckets, key=lambda bucket: bucket.key)


def group_steps(buckets: Sequence[Bucket], slot_bytes: int) -> list[Step]:
    """Neighbouring buckets together in steps of at most `slot_bytes`."""
    steps: list[list[Bucket]] = []
    room_bytes = 0
    for bucket in buckets:
        if not steps or bucket.num_bytes > room_bytes:
            steps.append([])
            room_bytes = slot_bytes
        steps[-1].append(bucket)
        room_bytes -= bucket.num_bytes
    return [tuple(step) for step in steps]


def schedule(
    steps: Iterable[Step], num_slots: int, needs_slot: Callable[[Step], bool]
) -> Iterator[Action]:
    """The order in which a worker launches and finishes its steps; see the module's docstring.

    needs_slot: asked once a step, right before it is launched or waits for a slot.
    """
    launched: deque[Action] = deque()
    free = deque(range(num_slots))
    for step in steps:
        slot = None
        if needs_slot(step):
            while not free:
                finished = launched.popleft()
                yield finished._replace(kind="finish")
                if finished.slot is not None:
                    free.append(finished.slot)
            slot = free.popleft()
        action = Action("launch", slot, step)
        launched.append(action)
        yield action
    for action in launched:
        yield action._replace(kind="finish")
