"""The transfer plan of one worker, made alone: what it sends, receives and copies.

For every box that a target coordinate needs: what its worker already holds is copied within it,
the rest comes from one copy of the source state, chosen by a rule that both ends evaluate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout, Roster
from liver_hpc.layout.ownership import owned_boxes, stage_shards
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


def copies(model: ModelSpec, layout: Layout, kind: str, tensor_index: int) -> list[Copy]:
    """All copies of one kind of one tensor, in an order that every worker agrees on."""
    tensor = model.tensors[tensor_index]
    tp_ranks = [None] if tensor.tp_dim is not None else list(range(layout.tp))
    dp_ranks = list(range(layout.dp)) if kind == PARAMETER else [None]
    return [
        Copy(stage, tp, dp)
        for stage in model.stages_of(tensor, layout.pp)
        for dp in dp_ranks
        for tp in tp_ranks
    ]


def copy_coordinates(
    model: ModelSpec, layout: Layout, tensor_index: int, copy: Copy
) -> Iterator[Coordinate]:
    """The coordinates that together hold a copy."""
    tp_ranks = range(layout.tp) if copy.tp is None else (copy.tp,)
    if copy.dp is None:
        dp_ranks = stage_shards(model, layout, copy.stage).owners(tensor_index)
    else:
        dp_ranks = range(copy.dp, copy.dp + 1)
    for tp in tp_ranks:
        for dp in dp_ranks:
            yield Coordinate(tp, copy.stage, dp)


@dataclass(frozen=True)
class Handover:
    """A source and a target roster of one model: who gives what to whom."""

    model: ModelSpec
    source: Roster
    target: Roster

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return (PARAMETER, *self.model.optimizer_kinds)

    def incoming(self, kind: str, tensor_index: int, to: Coordinate) -> list[Move]:
        """How a target coordinate gets its boxes of one tensor; sender == receiver is a copy."""
        receiver = self.target.worker_at(to)
        at = self.source.coordinate_of(receiver)
        held = () if at is None else owned_boxes(
            self.model, self.source.layout, at, kind, tensor_index
        )  # fmt: skip
        moves: list[Move] = []
        missing = list(owned_boxes(self.model, self.target.layout, to, kind, tensor_index))
        for have in held:
            rest: list[Box] = []
            for box in missing:
                common = box.intersect(have)
                if common is not None:
                    moves.append(Move(tensor_index, kind, common, receiver, receiver))
                rest.extend(subtract(box, have))
            missing = rest
        if missing:
            moves.extend(self._remote(kind, tensor_index, to, missing))
        return moves

    def _remote(
        self, kind: str, tensor_index: int, to: Coordinate, missing: list[Box]
    ) -> list[Move]:
        layout, receiver = self.source.layout, self.target.worker_at(to)
        choices = copies(self.model, layout, kind, tensor_index)
        # Spread receivers and tensors over the copies, so that no holder serves everybody.
        copy = choices[(tensor_index + to.dp + to.pp + to.tp) % len(choices)]
        moves = [
            Move(tensor_index, kind, part, self.source.worker_at(at), receiver)
            for at in copy_coordinates(self.model, layout, tensor_index, copy)
            for own in owned_boxes(self.model, layout, at, kind, tensor_index)
            for box in missing
            if (part := own.intersect(box)) is not None
        ]
        got, wanted = sum(m.box.elements for m in moves), sum(box.elements for box in missing)
        if got != wanted:
            name = self.model.tensors[tensor_index].name
            raise PlanError(
                f"worker {receiver}: {kind} of {name!r}: the source holds {got} of the {wanted} "
                f"elements that {to} of {self.target.layout} needs"
            )
        return moves

    def receivers(self, kind: str, tensor_index: int) -> Iterator[Coordinate]:
        """Target coordinates that own a part of one kind of one tensor."""
        layout, model = self.target.layout, self.model
        for stage in model.stages_of(model.tensors[tensor_index], layout.pp):
            dp_ranks = (
                range(layout.dp)
                if kind == PARAMETER
                else stage_shards(model, layout, stage).owners(tensor_index)
            )
            for dp in dp_ranks:
                for tp in range(layout.tp):
                    yield Coordinate(tp, stage, dp)


def transfer_plan(model: ModelSpec, source: Roster, target: Roster, worker: int) -> TransferPlan:
    """What `worker` has to do for the handoff from `source` to `target`.

    Pure, without communication: both ends of every pair derive the same moves. Raises PlanError
    when the source does not hold all that the target needs.
    """
    handover = Handover(model, source, target)
    receives: list[Move] = []
    local: list[Move] = []
    to = target.coordinate_of(worker)
    if to is not None:
        for index in model.stage_tensors(target.layout.pp, to.pp):
            for kind in handover.kinds:
                for move in handover.incoming(kind, index, to):
                    (local if move.sender == worker else receives).append(move)
    sends: list[Move] = []
    at = source.coordinate_of(worker)
    if at is not None:
        for index in model.stage_tensors(source.layout.pp, at.pp):
            for kind in handover.kinds:
                for coordinate in handover.receivers(kind, index):
                    if target.worker_at(coordinate) == worker:
                        continue
                    sends.extend(
                        move
                        for move in handover.incoming(kind, index, coordinate)
                        if move.sender == worker
                    )
    return TransferPlan(worker, tuple(sorted(sends)), tuple(sorted(receives)), tuple(sorted(local)))
