"""The transfer plan of one worker, made alone: what it sends, receives and copies.

A worker copies within itself what it already holds of a box that its target coordinate needs. The
rest comes from one copy of the source state, chosen by a rule that both ends evaluate.

A sender finds its receivers by running the rule backwards, and an optimizer shard finds its
neighbours by its place in the flat buffer, so nobody goes through all workers: the work grows with
the worker's own tensors and moves alone, once the rank maps are indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import optimizer_owners, owned_boxes
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, Move, TransferPlan


def subtract(box: Box, hole: Box) -> tuple[Box, ...]:
    """What is left of `box` without `hole`: up to four disjoint boxes."""
    inner = box.intersect(hole)
    if inner is None:
        return (box,)
    parts = (
        Box(box.row0, inner.row0, box.col0, box.col1),
        Box(inner.row1, box.row1, box.col0, box.col1),
        Box(inner.row0, inner.row1, box.col0, inner.col0),
        Box(inner.row0, inner.row1, inner.col1, box.col1),
    )
    return tuple(part for part in parts if part.row0 < part.row1 and part.col0 < part.col1)


@dataclass(frozen=True)
class Copy:
    """One complete copy of a tensor's state in a layout; an axis that is None is partitioned."""

    stage: int
    tp: int | None
    dp: int | None


@dataclass(frozen=True)
class Copies(Sequence[Copy]):
    """All copies of one kind of one tensor, in an order that every worker agrees on.

    tp, dp: on how many ranks there are copies; None where the ranks share one copy.
    """

    stages: tuple[int, ...]
    tp: int | None
    dp: int | None

    def __len__(self) -> int:
        return len(self.stages) * (self.dp or 1) * (self.tp or 1)

    def __getitem__(self, number: int) -> Copy:  # type: ignore[override]  # no slices
        rest, tp = divmod(range(len(self))[number], self.tp or 1)
        stage, dp = divmod(rest, self.dp or 1)
        return Copy(
            self.stages[stage],
            None if self.tp is None else tp,
            None if self.dp is None else dp,
        )

    def number_at(self, at: Coordinate) -> int:
        """Which copy a coordinate that holds the tensor has a part of."""
        dp = 0 if self.dp is None else at.dp
        tp = 0 if self.tp is None else at.tp
        return (self.stages.index(at.pp) * (self.dp or 1) + dp) * (self.tp or 1) + tp


def copies(model: ModelSpec, layout: Layout, kind: str, tensor_index: int) -> Copies:
    """All copies of one kind of one tensor."""
    tensor = model.tensors[tensor_index]
    return Copies(
        model.stages_of(tensor_index, layout.pp),
        tp=layout.tp if tensor.tp_dim is None else None,
        dp=layout.dp if kind == PARAMETER else None,
    )


def copy_coordinates(
    model: ModelSpec, layout: Layout, tensor_index: int, copy: Copy, boxes: Sequence[Box]
) -> Iterator[Coordinate]:
    """Those of the coordinates that together hold a copy that may hold a part of `boxes`."""
    for tp in range(layout.tp) if copy.tp is None else (copy.tp,):
        if copy.dp is None:
            seat = Coordinate(tp, copy.stage, 0)
            for dp in optimizer_owners(model, layout, seat, tensor_index, boxes):
                yield Coordinate(tp, copy.stage, dp)
        else:
            yield Coordinate(tp, copy.stage, copy.dp)


def common_boxes(some: Sequence[Box], others: Sequence[Box]) -> list[Box]:
    """The parts that two lists of boxes have in common."""
    return [part for a in some for b in others if (part := a.intersect(b)) is not None]


@dataclass(frozen=True)
class Handoff:
    """Who gives what to whom when the state of one model moves between two rank maps."""

    model: ModelSpec
    source: RankMap
    target: RankMap

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.model.kinds

    def incoming(self, kind: str, tensor_index: int, to: Coordinate) -> list[Move]:
        """How a target coordinate gets its boxes of one tensor; sender == receiver is a copy."""
        receiver = self.target.worker_at(to)
        held = self._held(kind, tensor_index, receiver)
        needed = owned_boxes(self.model, self.target.layout, to, kind, tensor_index)
        moves = [
            Move(tensor_index, kind, box, receiver, receiver) for box in common_boxes(held, needed)
        ]
        missing = _without(needed, held)
        if missing:
            moves.extend(self._remote(kind, tensor_index, to, missing))
        return moves

    def outgoing(self, kind: str, tensor_index: int, at: Coordinate) -> Iterator[Move]:
        """What a source coordinate that holds the tensor sends of it to other workers."""
        sender = self.source.worker_at(at)
        own = owned_boxes(self.model, self.source.layout, at, kind, tensor_index)
        if not own:
            return
        for to in self._askers(kind, tensor_index, at, own):
            receiver = self.target.worker_at(to)
            needed = owned_boxes(self.model, self.target.layout, to, kind, tensor_index)
            if receiver == sender or not common_boxes(own, needed):
                continue
            missing = _without(needed, self._held(kind, tensor_index, receiver))
            for box in common_boxes(own, missing):
                yield Move(tensor_index, kind, box, sender, receiver)

    def _held(self, kind: str, tensor_index: int, worker: int) -> tuple[Box, ...]:
        at = self.source.coordinate_of(worker)
        if at is None:
            return ()
        return owned_boxes(self.model, self.source.layout, at, kind, tensor_index)

    def _remote(
        self, kind: str, tensor_index: int, to: Coordinate, missing: list[Box]
    ) -> list[Move]:
        layout, receiver = self.source.layout, self.target.worker_at(to)
        choices = copies(self.model, layout, kind, tensor_index)
        copy = choices[_turn(tensor_index, to) % len(choices)]
        moves = [
            Move(tensor_index, kind, part, self.source.worker_at(at), receiver)
            for at in copy_coordinates(self.model, layout, tensor_index, copy, missing)
            for part in common_boxes(
                owned_boxes(self.model, layout, at, kind, tensor_index), missing
            )
        ]
        got, wanted = sum(m.box.elements for m in moves), sum(box.elements for box in missing)
        if got != wanted:
            name = self.model.tensors[tensor_index].name
            raise PlanError(
                f"worker {receiver}: {kind} of {name!r}: the source holds {got} of the {wanted} "
                f"elements that {to} of {self.target.layout} needs"
            )
        return moves

    def _askers(
        self, kind: str, tensor_index: int, at: Coordinate, own: Sequence[Box]
    ) -> Iterator[Coordinate]:
        """The target coordinates that would take what they miss of a tensor from `at`'s copy.

        For optimizer state these are only the ones that may need a part of `own`, which `at` holds.
        """
        layout, model = self.target.layout, self.model
        choices = copies(model, self.source.layout, kind, tensor_index)
        number, turns = choices.number_at(at), len(choices)
        for stage in model.stages_of(tensor_index, layout.pp):
            for tp in range(layout.tp):
                seat = Coordinate(tp, stage, 0)
                first = (number - _turn(tensor_index, seat)) % turns
                dp_ranks: Sequence[int] = range(first, layout.dp, turns)
                if kind != PARAMETER:
                    owners = optimizer_owners(model, layout, seat, tensor_index, own)
                    dp_ranks = [dp for dp in owners if dp in dp_ranks]
                for dp in dp_ranks:
                    yield seat._replace(dp=dp)


def _turn(tensor_index: int, to: Coordinate) -> int:
    """Spreads receivers and tensors over the copies, so that no holder serves everybody."""
    return tensor_index + to.dp + to.pp + to.tp


def _without(boxes: Sequence[Box], holes: Sequence[Box]) -> list[Box]:
    """What is left of boxes without any of the holes."""
    left = list(boxes)
    for hole in holes:
        left = [part for box in left for part in subtract(box, hole)]
    return left


def transfer_plan(model: ModelSpec, source: RankMap, target: RankMap, worker: int) -> TransferPlan:
    """What `worker` has to do for the handoff from `source` to `target`.

    Pure, without communication: both ends of every pair derive the same moves. Raises PlanError
    when the source does not hold all that the target needs.
    """
    handoff = Handoff(model, source, target)
    receives: list[Move] = []
    local: list[Move] = []
    sends: list[Move] = []
    to = target.coordinate_of(worker)
    if to is not None:
        for index in model.stage_tensors(target.layout.pp, to.pp):
            for move in _every_kind(model, handoff.incoming, index, to):
                (local if move.sender == worker else receives).append(move)
    at = source.coordinate_of(worker)
    if at is not None:
        for index in model.stage_tensors(source.layout.pp, at.pp):
            sends.extend(_every_kind(model, handoff.outgoing, index, at))
    return TransferPlan(worker, _in_order(sends), _in_order(receives), _in_order(local))


def _every_kind(
    model: ModelSpec,
    moves_of: Callable[[str, int, Coordinate], Iterable[Move]],
    tensor_index: int,
    at: Coordinate,
) -> Iterator[Move]:
    """The moves of all kinds of a tensor; those of optimizer state are planned once."""
    yield from moves_of(PARAMETER, tensor_index, at)
    first, *others = model.optimizer_kinds
    for move in moves_of(first, tensor_index, at):
        yield move
        for kind in others:
            yield Move(move.tensor_index, kind, move.box, move.sender, move.receiver)


def _in_order(moves: list[Move]) -> tuple[Move, ...]:
    """Sorted as moves compare; by a key that is several times faster than comparing them."""
    return tuple(sorted(moves, key=attrgetter("tensor_index", "kind", "box", "sender", "receiver")))
