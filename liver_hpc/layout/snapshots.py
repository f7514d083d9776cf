"""Snapshots: the share of the state that each rank copies into host memory, which other worker
holds a second copy of it, and how a world is filled from them. Pure.

The shares of all ranks are the state, each element of it once: of what is trained, the shard of the
optimizer that the rank has anyway, in full precision; parameters of lower precision are cast from
it. A worker's share is so the smaller the more workers there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap, alone
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import Copies, common_boxes, moves_at, takers
from liver_hpc.layout.tensors import (
    EXP_AVG,
    MAIN,
    MOMENTS,
    PARAMETER,
    Box,
    ModelSpec,
    Move,
    TransferPlan,
)

BOUNDARIES_HELD = 2
"""Of which a worker has its own share and its wards': the newest complete one and the next one."""


def precise(model: ModelSpec) -> str:
    """The kind of state that has what is trained in full precision."""
    return PARAMETER if model.main_is_parameter else MAIN


def shared_as(model: ModelSpec, tensor_index: int) -> str:
    """The kind of state whose boxes are a tensor's shares: that of optimizer state, where it has
    such."""
    return EXP_AVG if model.tensors[tensor_index].role == "trained" else PARAMETER


def snapshot_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate
) -> Iterator[tuple[str, int, Box]]:
    """(kind, tensor index, box) of a coordinate's share, always in the same order."""
    for index in model.held_tensors(layout, at):
        shared = shared_as(model, index)
        if Copies(model, layout, shared, index).number_at(at) != 0:
            continue
        kinds = (PARAMETER,) if shared == PARAMETER else (precise(model), *MOMENTS)
        for kind, box in product(kinds, owned_boxes(model, layout, at, shared, index)):
            yield kind, index, box


def snapshot_bytes(model: ModelSpec, layout: Layout, at: Coordinate) -> int:
    """The size of a coordinate's share."""
    return sum(
        box.elements * model.element_bytes(kind, index)
        for kind, index, box in snapshot_boxes(model, layout, at)
    )


def largest_snapshot(model: ModelSpec, layout: Layout) -> int:
    """The size of the largest share of a layout. Replicas beyond the first few have no more than
    those, so few are looked at."""
    some = range(min(layout.replicas, 2 * max(layout.ep, 1)))
    return max(
        snapshot_bytes(model, layout, Coordinate(tp, pp, replica))
        for tp in range(layout.tp)
        for pp in range(layout.pp)
        for replica in some
    )


def most_wards(rank_map: RankMap) -> int:
    """Of how many others a worker holds the second copies; of the one that has most of them."""
    found = Counter(partner for partner in partners(rank_map) if partner is not None)
    return max(found.values(), default=0)


def most_held_bytes(held: Mapping[Layout, int]) -> int:
    """The most host memory that snapshots take of a worker, of a run in these layouts. held: what
    it has of one boundary, its own share and its wards'.

    It is that of the old world's two newest boundaries and of the new world's first one, right
    after a handoff; out of a world of one, only of one.
    """
    largest = max((size for layout, size in held.items() if layout.workers > 1), default=0)
    alone = max((size for layout, size in held.items() if layout.workers == 1), default=0)
    return max(BOUNDARIES_HELD * largest, alone if largest else 0) + largest


def partners(rank_map: RankMap) -> tuple[int | None, ...]:
    """By rank, the worker that holds a second copy of its snapshot; None where there is no other.

    It is on another node, in a ring of all nodes, and holds that one copy; unless one node has more
    than half of all workers, whose copies the others share then. On one node it is the next worker.
    """
    nodes = rank_map.nodes or tuple(map(alone, rank_map.workers))
    people: dict[int, list[int]] = {}
    for node, worker in zip(nodes, rank_map.workers, strict=True):
        people.setdefault(node, []).append(worker)
    ring = [*people.values()]
    if len(ring) == 1:
        ring = [[worker] for worker in rank_map.workers]
    if len(ring) == 1:
        return (None,)
    in_order = [worker for here in ring for worker in here]
    largest = max(ring, key=len)
    # So far on from any worker of a node there is none of that node, if it has no more than half.
    found = dict(zip(in_order, in_order[len(largest) :] + in_order[: len(largest)], strict=True))
    if 2 * len(largest) > len(in_order):
        others = [worker for worker in in_order if worker not in largest]
        found |= {worker: others[place % len(others)] for place, worker in enumerate(largest)}
        found |= {worker: largest[place] for place, worker in enumerate(others)}
    return tuple(found[worker] for worker in rank_map.workers)


@dataclass(frozen=True)
class Refill:
    """How a world comes to its state from the snapshots of a layout that no longer stands.

    holders: by rank of `saved`, the worker that gives its snapshot.
    """

    model: ModelSpec
    saved: Layout
    holders: Sequence[int]
    target: RankMap

    def plan(self, worker: int) -> TransferPlan:
        """What a worker sends of the snapshots that it gives, and what it gets for its seat.

        Both ends of every pair derive the same moves, without communication. Raises PlanError where
        the saved layout does not hold all that the target needs.
        """
        model, saved, seat = self.model, self.saved, self.target.coordinate_of(worker)
        given = (rank for rank, holder in enumerate(self.holders) if holder == worker)
        outgoing = (moves_at(model, saved, saved.coordinate(r), self._outgoing) for r in given)
        incoming = moves_at(model, self.target.layout, seat, self._incoming)
        return TransferPlan.of(worker, chain.from_iterable(outgoing), incoming)

    def _incoming(self, kind: str, tensor_index: int, to: Coordinate) -> Iterator[Move]:
        needed = owned_boxes(self.model, self.target.layout, to, kind, tensor_index)
        if not needed:
            return
        receiver = self.target.worker_at(to)
        shared = shared_as(self.model, tensor_index)
        copies = Copies(self.model, self.saved, shared, tensor_index)
        for at, _, part in copies.parts(0, needed, f"worker {receiver}"):
            holder = self.holders[self.saved.rank(at)]
            yield Move(tensor_index, kind, part, holder, receiver)

    def _outgoing(self, kind: str, tensor_index: int, at: Coordinate) -> Iterator[Move]:
        """What goes to other workers."""
        shared = shared_as(self.model, tensor_index)
        if Copies(self.model, self.saved, shared, tensor_index).number_at(at) != 0:
            return
        own = owned_boxes(self.model, self.saved, at, shared, tensor_index)
        holder = self.holders[self.saved.rank(at)]
        for to in takers(self.model, self.target.layout, (kind, tensor_index), own):
            receiver = self.target.worker_at(to)
            if receiver != holder:
                needed = owned_boxes(self.model, self.target.layout, to, kind, tensor_index)
                for part in common_boxes(own, needed):
                    yield Move(tensor_index, kind, part, holder, receiver)
