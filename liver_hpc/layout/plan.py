"""The transfer plan of one worker, made alone: what it sends, receives and copies.

A worker copies within itself what it already holds of a box that its target coordinate needs. The
rest comes from one copy of the source state, chosen by a rule that both ends evaluate: one on its
own node before any other.

A sender finds its receivers by running the rule backwards, and an optimizer shard finds its
neighbours by its place in the flat buffer, so nobody goes through all workers: the work grows with
the worker's own tensors and moves alone, once the rank maps are indexed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import optimizer_owners, owned_boxes
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, Move, TransferPlan

MovesOf = Callable[[str, int, Coordinate], Iterable[Move]]
"""The moves of one kind of one tensor at a coordinate."""


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
class Copies:
    """The complete copies of one kind of one tensor in a layout, numbered as all workers agree.

    Parameters have a copy on every replica that holds the tensor, what is not split over tp has one
    on every tp rank, and a tied tensor has one on either of its stages. Other ranks share a copy.
    """

    model: ModelSpec
    layout: Layout
    kind: str
    tensor_index: int

    @property
    def _stages(self) -> tuple[int, ...]:
        return self.model.stages_of(self.tensor_index, self.layout)

    @property
    def _replicas(self) -> range:
        """The replicas that have a copy each; the first holder stands for those that share one."""
        holders = self.model.holders(self.tensor_index, self.layout)
        return holders if self.kind == PARAMETER else holders[:1]

    @property
    def _on_tp(self) -> int:
        """On how many tp ranks there are copies."""
        split = self.model.tensors[self.tensor_index].tp_dim is not None
        return 1 if split else self.layout.tp

    def __len__(self) -> int:
        return len(self._stages) * len(self._replicas) * self._on_tp

    def number_at(self, at: Coordinate) -> int:
        """Which copy a coordinate that holds the tensor has a part of."""
        replicas, tp = self._replicas, self._on_tp
        replica = replicas.index(at.replica) if self.kind == PARAMETER else 0
        return (self._stages.index(at.pp) * len(replicas) + replica) * tp + at.tp % tp

    def has_part(self, at: Coordinate) -> bool:
        """Whether a coordinate holds a part of the tensor's parameters, or all of it."""
        home = self.model.home(self.tensor_index, self.layout)
        return at.pp in self._stages and home in (None, self.layout.ep_rank(at))

    @property
    def workers_of_one(self) -> int:
        """How many workers have a part of one copy of parameters."""
        return self.layout.tp // self._on_tp

    @property
    def held_alike(self) -> tuple[object, ...]:
        """Equal for tensors whose copies of parameters are on the same workers."""
        return self._stages, self._replicas, self._on_tp

    def parts(
        self, number: int, needed: Sequence[Box], receiver: str
    ) -> list[tuple[Coordinate, Box, Box]]:
        """What gives `needed` of a copy: (coordinate, a box that it owns, a part of that box).

        Raises PlanError, which names the receiver, when the copy does not hold all of it.
        """
        found = [
            (at, own, part)
            for at in self._holders(number, needed)
            for own in owned_boxes(self.model, self.layout, at, self.kind, self.tensor_index)
            for box in needed
            if (part := own.intersect(box)) is not None
        ]
        got, wanted = sum(p.elements for _, _, p in found), sum(box.elements for box in needed)
        if got != wanted:
            raise PlanError(
                f"{receiver}: {self.kind} of {self.model.tensors[self.tensor_index].name!r}: "
                f"{self.layout} holds {got} of the {wanted} elements that it needs"
            )
        return found

    def _holders(self, number: int, boxes: Sequence[Box]) -> Iterator[Coordinate]:
        """The coordinates of a copy that may hold a part of `boxes`."""
        replicas = self._replicas
        rest, tp = divmod(number, self._on_tp)
        stage, replica = divmod(rest, len(replicas))
        for tp_rank in range(self.layout.tp) if self._on_tp == 1 else (tp,):
            seat = Coordinate(tp_rank, self._stages[stage], replicas[replica])
            if self.kind == PARAMETER:
                yield seat
            else:
                owners = optimizer_owners(self.model, self.layout, seat, self.tensor_index, boxes)
                yield from (seat._replace(replica=owner) for owner in owners)


def common_boxes(some: Sequence[Box], others: Sequence[Box]) -> list[Box]:
    """The parts that two lists of boxes have in common."""
    return [part for a in some for b in others if (part := a.intersect(b)) is not None]


@dataclass(frozen=True)
class Handoff:
    """Who gives what to whom when the state of one model moves between two rank maps."""

    model: ModelSpec
    source: RankMap
    target: RankMap

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
            copies = Copies(self.model, self.source.layout, kind, tensor_index)
            number = self._copy_for(copies, to)
            moves += [
                Move(tensor_index, kind, part, self.source.worker_at(at), receiver)
                for at, _, part in copies.parts(number, missing, f"worker {receiver}")
            ]
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

    def _copy_for(self, copies: Copies, to: Coordinate) -> int:
        """The copy from which a target coordinate takes what it misses: one that is as a whole on
        its own node, where there is such a one."""
        near = self._copies_on(copies, self.target.node_at(to))
        turn = _turn(copies.tensor_index, to)
        return near[turn % len(near)] if near else turn % len(copies)

    def _copies_on(self, copies: Copies, node: int) -> tuple[int, ...]:
        """The copies of parameters that one node has as a whole; none of optimizer state, which is
        shared by all replicas."""
        if copies.kind != PARAMETER or not self.source.nodes:
            return ()
        key = (node, *copies.held_alike)
        if key not in self._near:
            parts = Counter(
                copies.number_at(at) for at in self.source.on_node(node) if copies.has_part(at)
            )
            found = (number for number, count in parts.items() if count == copies.workers_of_one)
            self._near[key] = tuple(sorted(found))
        return self._near[key]

    @cached_property
    def _near(self) -> dict[tuple[object, ...], tuple[int, ...]]:
        return {}

    def _held(self, kind: str, tensor_index: int, worker: int) -> tuple[Box, ...]:
        at = self.source.coordinate_of(worker)
        if at is None:
            return ()
        return owned_boxes(self.model, self.source.layout, at, kind, tensor_index)

    def _askers(
        self, kind: str, tensor_index: int, at: Coordinate, own: Sequence[Box]
    ) -> Iterator[Coordinate]:
        """The target coordinates that would take what they miss of a tensor from `at`'s copy.

        For optimizer state these are only the ones that may need a part of `own`, which `at` holds.
        """
        copies = Copies(self.model, self.source.layout, kind, tensor_index)
        number, node = copies.number_at(at), self.source.node_at(at)
        if number in self._copies_on(copies, node):
            needs = Copies(self.model, self.target.layout, kind, tensor_index)
            for to in self.target.on_node(node):
                if needs.has_part(to) and self._copy_for(copies, to) == number:
                    yield to
        turn = number, len(copies)
        for to in takers(self.model, self.target.layout, (kind, tensor_index), own, turn):
            if not self._copies_on(copies, self.target.node_at(to)):
                yield to


def takers(
    model: ModelSpec,
    layout: Layout,
    state: tuple[str, int],
    own: Sequence[Box],
    turn: tuple[int, int] = (0, 1),
) -> Iterator[Coordinate]:
    """The coordinates of a layout that hold a kind of a tensor; of optimizer state those alone that
    may need a part of `own`. state: the kind, and the tensor's index. turn: which one, of how many:
    those alone that have it."""
    (kind, tensor_index), (number, turns) = state, turn
    holders = model.holders(tensor_index, layout)
    for stage in model.stages_of(tensor_index, layout):
        for tp in range(layout.tp):
            seat = Coordinate(tp, stage, 0)
            asking = range((number - _turn(tensor_index, seat)) % turns, layout.replicas, turns)
            replicas = [replica for replica in asking if replica in holders]
            if kind != PARAMETER:
                owners = optimizer_owners(model, layout, seat, tensor_index, own)
                replicas = [replica for replica in owners if replica in asking]
            for replica in replicas:
                yield seat._replace(replica=replica)


def _turn(tensor_index: int, to: Coordinate) -> int:
    """Spreads receivers and tensors over the copies, so that no holder serves everybody."""
    return tensor_index + to.replica + to.pp + to.tp


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
    return TransferPlan.of(
        worker,
        moves_at(model, source.layout, source.coordinate_of(worker), handoff.outgoing),
        moves_at(model, target.layout, target.coordinate_of(worker), handoff.incoming),
    )


def moves_at(
    model: ModelSpec, layout: Layout, at: Coordinate | None, moves_of: MovesOf
) -> Iterator[Move]:
    """The moves of all that a coordinate holds, none without one; those of optimizer state are
    planned once for all its kinds."""
    if at is None:
        return
    planned, *others = model.optimizer_kinds
    for index in model.held_tensors(layout, at):
        yield from moves_of(PARAMETER, index, at)
        for move in moves_of(planned, index, at):
            yield from (move, *(move._replace(kind=kind) for kind in others))
