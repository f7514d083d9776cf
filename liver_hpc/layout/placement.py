"""Who sits where in the target: on which node each group, and who of a node in which seat.

A tensor-parallel group is on one node wherever nodes have room for it, before that a group of
experts or of context parallelism. Among such seats those are taken with which the fewest bytes
move between nodes, then between the workers of a node; where it makes no difference, neighbours in
a pipeline are next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from liver_hpc.errors import ConfigError
from liver_hpc.layout.assignment import Problem
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap, alone
from liver_hpc.layout.overlap import Overlap, incidence
from liver_hpc.layout.tensors import ModelSpec

Nodes = Mapping[int, int]
"""The number of each worker's node; a worker without is alone on one."""


def place(
    model: ModelSpec,
    source: RankMap,
    target: Layout,
    available: Sequence[int],
    nodes: Nodes | None = None,
) -> RankMap:
    """Seats `target.workers` of the `available` workers.

    `available` may hold more workers than needed (the rest leave) and workers that are not in
    the source (joiners). nodes: of both and of the source's workers. Deterministic. Raises
    ConfigError when there are too few.
    """
    return _seated(_Gains(source, Overlap(model, source.layout, target)), target, available, nodes)


def first_rank_map(layout: Layout, workers: Sequence[int], nodes: Nodes | None = None) -> RankMap:
    """Seats the workers of a world that takes over from none; on one node in their order."""
    return _seated(_Gains(), layout, workers, nodes)


class _Block(NamedTuple):
    """Seats that belong on one node: some tp ranks of some neighbouring replicas on a stage."""

    replica: int
    stage: int
    tp: int
    replicas: int
    tp_ranks: int

    def ranks(self, layout: Layout) -> list[int]:
        return [
            layout.rank(Coordinate(tp, self.stage, replica))
            for replica in range(self.replica, self.replica + self.replicas)
            for tp in range(self.tp, self.tp + self.tp_ranks)
        ]

    def split(self, replicas: int, tp_ranks: int) -> list[_Block]:
        return [
            _Block(replica, self.stage, tp, replicas, tp_ranks)
            for replica in range(self.replica, self.replica + self.replicas, replicas)
            for tp in range(self.tp, self.tp + self.tp_ranks, tp_ranks)
        ]


def _seated(
    gains: _Gains, target: Layout, available: Sequence[int], nodes: Nodes | None
) -> RankMap:
    if len(available) < target.workers:
        raise ConfigError(
            f"layout {target} wants {target.workers} workers, available are {list(available)}"
        )
    nodes = nodes or {}
    people, held = _by_node(available, nodes), gains.by_node(nodes)
    bins = [held.get(node, []) for node in people]
    ranks = _ranks_on(gains, target, bins, [len(workers) for workers in people.values()])
    seated: dict[int, int] = {}
    within = gains.within([*people.values()], ranks)
    for workers, mine, problem in zip(people.values(), ranks, within, strict=True):
        for rank, number in zip(mine, problem.solve(), strict=True):
            assert number is not None, "there is a worker for every seat of its node"
            seated[rank] = workers[number]
    everybody = tuple(seated[rank] for rank in range(target.workers))
    on = tuple(nodes.get(worker, alone(worker)) for worker in everybody) if nodes else ()
    return RankMap(target, everybody, on)


def _ranks_on(
    gains: _Gains, target: Layout, held: Sequence[Sequence[int]], free: Sequence[int]
) -> list[list[int]]:
    """The target's ranks on each node, sorted: of the largest blocks as many as fit, then of the
    parts of what is left."""
    found: list[list[int]] = [[] for _ in free]
    together = math.lcm(target.cp, target.ep)
    sizes = [(size, target.tp) for size in _parts(together)]
    sizes += [(1, size) for size in _parts(target.tp)[1:]]
    left = [
        _Block(replica, stage, 0, together, target.tp)
        for replica in range(0, target.replicas, together)
        for stage in range(target.pp)
    ]
    for replicas, tp_ranks in sizes:
        left = [part for block in left for part in block.split(replicas, tp_ranks)]
        units = [block.ranks(target) for block in left]
        slots = [
            (count - len(ranks)) // (replicas * tp_ranks)
            for count, ranks in zip(free, found, strict=True)
        ]
        chosen = gains.problem(held, units, slots).solve()
        for number, unit in zip(chosen, units, strict=True):
            if number is not None:
                found[number] += unit
        left = [block for block, number in zip(left, chosen, strict=True) if number is None]
        if not left:
            break
    return [sorted(ranks) for ranks in found]


def _parts(size: int) -> list[int]:
    """A size and what is left of it, divided by one prime after the other, down to 1."""
    found = [size]
    while size > 1:
        size //= next(prime for prime in range(2, size + 1) if size % prime == 0)
        found.append(size)
    return found


class _Gains:
    """What of the target's state is there already, by bins and units; nothing where there is no
    source."""

    def __init__(self, source: RankMap | None = None, overlap: Overlap | None = None) -> None:
        workers = () if source is None else source.workers
        self._ranks = {worker: rank for rank, worker in enumerate(workers)}
        self._overlap = overlap
        if overlap is not None:
            self._state = overlap.state + overlap.same_seats

    def ranks_of(self, workers: Iterable[int]) -> list[int]:
        """The source's ranks of those of the workers that have one."""
        return [self._ranks[worker] for worker in workers if worker in self._ranks]

    def by_node(self, nodes: Nodes) -> dict[int, list[int]]:
        """The source's ranks on each node, also of workers that leave: they still give."""
        return {
            node: self.ranks_of(workers) for node, workers in _by_node(self._ranks, nodes).items()
        }

    def problem(
        self, bins: Sequence[Sequence[int]], units: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> Problem:
        """Of seating units of the target's ranks, of one size, where bins of the source's are; in
        bytes."""
        overlap = self._overlap
        if overlap is None:
            nothing = csr_array((len(bins), len(units)))
            kinds, sorts = (np.zeros(len(each), dtype=np.int64) for each in (units, bins))
            return Problem(kinds, sorts, np.array(slots), nothing, np.zeros((1, 1)))
        has, needs = (
            incidence(groups, len(places))
            for groups, places in ((bins, overlap.source_places), (units, overlap.target_places))
        )
        kinds, needed = _numbered(
            [tuple(overlap.target_places[rank] for rank in unit) for unit in units]
        )
        sorts, held = _numbered(
            [frozenset(overlap.source_places[rank] for rank in ranks) for ranks in bins]
        )
        of_kinds = np.array(needed, np.int64).reshape(len(needed), len(units[0]) if units else 0)
        shared = np.array([overlap.parameters(places)[of_kinds].sum(axis=1) for places in held])
        return Problem(kinds, sorts, np.array(slots), has @ self._state @ needs.T, shared)

    def within(
        self, workers: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]]
    ) -> Iterator[Problem]:
        """Of seating each node's workers at its ranks of the target, node by node; in bytes."""
        for node, own in enumerate(self._own_within(workers, ranks)):
            kinds, needed = _numbered([self._place_of(rank) for rank in ranks[node]])
            sorts, held = _numbered([self._places_of(worker) for worker in workers[node]])
            shared = np.array([self._parameters(places)[needed] for places in held])
            yield Problem(kinds, sorts, np.ones(len(own), np.int64), own, shared)

    def _own_within(
        self, workers: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float64]]:
        """[workers, ranks] of each node: what optimizer state they have in common."""
        own = [np.zeros((len(us), len(seats))) for us, seats in zip(workers, ranks, strict=True)]
        if self._overlap is None:
            return own
        state = self._state.tocoo()
        held = [[self._ranks.get(worker, -1) for worker in each] for each in workers]
        from_rank, to_rank = state.coords
        at, row = (each[from_rank] for each in _whereabouts(held, state.shape[0]))
        on, column = (each[to_rank] for each in _whereabouts(ranks, state.shape[1]))
        (here,) = np.nonzero((at == on) & (at >= 0))
        here = here[np.argsort(at[here], kind="stable")]
        ends = np.cumsum(np.bincount(at[here], minlength=len(own)))
        for block, of in zip(own, np.split(here, ends[:-1]), strict=True):
            block[row[of], column[of]] = state.data[of]
        return own

    def _place_of(self, rank: int) -> int:
        return self._overlap.target_places[rank] if self._overlap is not None else 0

    def _places_of(self, worker: int) -> frozenset[int]:
        """Where a worker of the source is; empty for any other."""
        if self._overlap is None or worker not in self._ranks:
            return frozenset()
        return frozenset({self._overlap.source_places[self._ranks[worker]]})

    def _parameters(self, places: frozenset[int]) -> NDArray[np.float64]:
        return self._overlap.parameters(places) if self._overlap is not None else np.zeros(1)


def _whereabouts(
    groups: Sequence[Sequence[int]], members: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each member the number of its group, -1 where it is in none, and its place there."""
    group, place = np.full(members + 1, -1), np.zeros(members + 1, np.int64)
    everybody = np.fromiter(chain.from_iterable(groups), np.int64)
    sizes = [len(each) for each in groups]
    group[everybody] = np.repeat(np.arange(len(groups)), sizes)
    place[everybody] = np.fromiter(chain.from_iterable(map(range, sizes)), np.int64)
    group[-1] = -1  # where the unknown ones were put
    return group[:-1], place[:-1]


def _by_node(workers: Iterable[int], nodes: Nodes) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for worker in workers:
        found.setdefault(nodes.get(worker, alone(worker)), []).append(worker)
    return found


Key = TypeVar("Key", bound=Hashable)


def _numbered(keys: Sequence[Key]) -> tuple[NDArray[np.int64], list[Key]]:
    """The number of each key's value, and the values in order of their first mention."""
    numbers: dict[Key, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys]), list(numbers)
