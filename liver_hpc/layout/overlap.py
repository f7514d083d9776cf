"""What of a target's seats the workers of a source hold, for worlds of any size.

Nothing is done for all pairs: parameters are the same on all replicas, and an optimizer shard
overlaps a few others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import stage_shards
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, TensorSpec

_Split = Literal["copied", "rows", "columns"]
Held = tuple[tuple[int, ...], int | None]
"""Who holds tensors in a layout: their stages, and their ep rank where not all have them."""


class _Lot(NamedTuple):
    """Tensors that the same workers hold. split: each tp rank has its share of them."""

    source: Held
    target: Held
    split: bool


class _Interval(NamedTuple):
    """A shard's part of one tensor on tp rank 0, in elements of the whole tensor, row by row; on
    tp rank i it lies i * `shift` further on."""

    tensor: int
    copy: int
    stage: int
    replica: int
    low: int
    high: int
    shift: int


class Overlap:
    """What workers of a source hold of what the seats of a target need, in bytes.

    A place is what decides which parameters a coordinate holds: its tp rank, stage and ep rank.
    Where a shard ends within a row of a tensor that tp splits by columns, the row counts in parts.
    """

    def __init__(self, model: ModelSpec, source: Layout, target: Layout) -> None:
        self._model, self._source, self._target = model, source, target
        self.source_places = [place_of(source, at) for at in source.coordinates()]
        self.target_places = [place_of(target, at) for at in target.coordinates()]
        self._known: dict[frozenset[int], NDArray[np.float64]] = {}

    # ---- parameters

    def parameters(self, places: frozenset[int]) -> NDArray[np.float64]:
        """What those at some of the source's places hold together of each place of the target."""
        if places not in self._known:
            self._known[places] = self._held_together(places)
        return self._known[places]

    def _held_together(self, places: frozenset[int]) -> NDArray[np.float64]:
        tp_ranks: defaultdict[_Lot, set[int]] = defaultdict(set)
        for place in places:
            rest, tp = divmod(place, self._source.tp)
            for lot in self._lots_at.get(rest, ()):
                tp_ranks[lot].add(tp)
        target, shares = self._target, _common_shares(self._source.tp, self._target.tp)
        held = np.zeros((target.pp, target.ep, target.tp))
        for lot, ranks in tp_ranks.items():
            stages, home = lot.target
            share = shares[sorted(ranks)].sum(axis=0) if lot.split else np.ones(target.tp)
            for stage in stages:
                held[stage, slice(None) if home is None else home] += self._lots[lot] * share
        return held.reshape(-1)

    @cached_property
    def _lots(self) -> dict[_Lot, int]:
        """Bytes of the parameters of each lot."""
        model, found = self._model, defaultdict[_Lot, int](int)
        for index, tensor in enumerate(model.tensors):
            source, target = (
                (model.stages_of(index, layout), model.home(index, layout))
                for layout in (self._source, self._target)
            )
            size_bytes = tensor.elements * model.element_bytes(PARAMETER, index)
            found[_Lot(source, target, tensor.tp_dim is not None)] += size_bytes
        return found

    @cached_property
    def _lots_at(self) -> dict[int, list[_Lot]]:
        """The lots of each stage and ep rank of the source."""
        found: defaultdict[int, list[_Lot]] = defaultdict(list)
        for lot in self._lots:
            stages, home = lot.source
            for stage in stages:
                for ep_rank in range(self._source.ep) if home is None else (home,):
                    found[ep_rank + self._source.ep * stage].append(lot)
        return found

    # ---- optimizer state

    @cached_property
    def state(self) -> csr_array:
        """Optimizer state that a source's rank and a target's have in common.

        [source.workers, target.workers], with entries where there is any.
        """
        model = self._model
        element_bytes = np.array(
            [
                sum(model.element_bytes(kind, index) for kind in model.optimizer_kinds)
                for index in range(len(model.tensors))
            ]
        )
        grid = math.lcm(self._source.tp, self._target.tp)
        longest = 1 + max(tensor.elements for tensor in model.tensors)
        have = self._rows(True, grid, longest)
        need = self._rows(False, grid, longest)
        # What lies on either side is sorted, and disjoint, along one axis that has all tensors.
        first = np.searchsorted(need.high, have.low, side="right")
        counts = np.searchsorted(need.low, have.high, side="left") - first
        ours = np.repeat(np.arange(len(counts)), counts)
        theirs = np.arange(len(ours)) + np.repeat(first + counts - np.cumsum(counts), counts)
        common = np.minimum(have.high[ours], need.high[theirs])
        common -= np.maximum(have.low[ours], need.low[theirs])
        size_bytes = common * element_bytes[have.tensor[ours]] / have.weight[ours]
        shape = (self._source.workers, self._target.workers)
        return csr_array(coo_array((size_bytes, (have.rank[ours], need.rank[theirs])), shape))

    @cached_property
    def same_seats(self) -> csr_array:
        """[source.workers, target.workers], 1 where both are the same coordinate: next to bytes it
        decides only where these make no difference."""
        source, target = self._source, self._target
        theirs = {at: rank for rank, at in enumerate(target.coordinates())}
        seats = ([theirs[at]] if at in theirs else [] for at in source.coordinates())
        return incidence([*seats], target.workers)

    def _rows(self, is_source: bool, grid: int, longest: int) -> _Rows:
        """All shards' intervals of the source or the target, sorted along one axis.

        Of a tensor that tp splits by columns each of `grid` column ranges is on the axis, of a
        tensor that tp does not split the copy on each tp rank of the target, and of a tied one
        each pair of copies.
        """
        layout = self._source if is_source else self._target
        tp = layout.tp
        copied = [(p % tp, p) for p in range(self._target.tp)]
        whole = [(rank, 0) for rank in range(tp)]
        columns = [(p * tp // grid, p) for p in range(grid)]
        copies = [self._most_copies(each) for each in (self._source, self._target)]
        intervals: dict[_Split, list[_Interval]] = {"copied": [], "rows": [], "columns": []}
        for interval in _intervals(self._model, layout):
            intervals[_split(self._model.tensors[interval.tensor])].append(interval)
        found = []
        for parts, weight, of_kind in zip(
            (copied, whole, columns), (1, 1, grid), intervals.values(), strict=True
        ):
            table = np.array(of_kind, dtype=np.int64).reshape(-1, len(_Interval._fields))
            pairs = np.array(
                [(*part, other) for part in parts for other in range(copies[is_source])]
            )
            table, pairs = np.repeat(table, len(pairs), axis=0), np.tile(pairs, (len(table), 1))
            tensor, copy, stage, replica, low, high, shift = table.T
            tp_rank, part, other = pairs.T
            sources, targets = (copy, other) if is_source else (other, copy)
            key = ((tensor * grid + part) * copies[0] + sources) * copies[1] + targets
            begin = key * longest + tp_rank * shift
            rank = tp_rank + tp * (replica + layout.replicas * stage)
            weights = np.full(len(key), weight)
            found.append((begin + low, begin + high, rank, tensor, weights))
        joined = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return _Rows(*(column[order] for column in joined))

    def _most_copies(self, layout: Layout) -> int:
        """On how many stages there is one tensor, at most."""
        model = self._model
        return max(len(model.stages_of(index, layout)) for index in range(len(model.tensors)))


class _Rows(NamedTuple):
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    rank: NDArray[np.int64]
    tensor: NDArray[np.int64]
    weight: NDArray[np.int64]


def place_of(layout: Layout, at: Coordinate) -> int:
    """The number of a coordinate's place, which all have that hold the same parameters."""
    return at.tp + layout.tp * (layout.ep_rank(at) + layout.ep * at.pp)


def incidence(groups: Sequence[Iterable[int]], members: int) -> csr_array:
    """[groups, members], 1 where a group has a member."""
    pairs = [(row, member) for row, group in enumerate(groups) for member in group]
    rows, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(groups), members))


def _common_shares(some: int, others: int) -> NDArray[np.float64]:
    """[some, others]: the share of a tensor that rank i of some and rank j of others both have."""
    i, j = np.arange(some)[:, None], np.arange(others)[None, :]
    low = np.maximum(i * others, j * some)
    high = np.minimum((i + 1) * others, (j + 1) * some)
    return (high - low).clip(0) / (some * others)


def _split(tensor: TensorSpec) -> _Split:
    """How tensor parallelism splits a tensor, as a matrix."""
    if tensor.tp_dim is None:
        return "copied"
    return "rows" if tensor.tp_dim == 0 else "columns"


def _intervals(model: ModelSpec, layout: Layout) -> Iterator[_Interval]:
    """What each optimizer shard has of each tensor."""
    for index, tensor in enumerate(model.tensors):
        if tensor.role != "trained":
            continue
        home, holders = model.home(index, layout), model.holders(index, layout)
        for copy, stage in enumerate(model.stages_of(index, layout)):
            shards = stage_shards(model, layout, stage, home)
            for owner in shards.owners(index):
                low, high = shards.interval(index, owner)
                for part in _in_whole(tensor, layout.tp, low, high):
                    yield _Interval(index, copy, stage, holders[owner], *part)


def _in_whole(tensor: TensorSpec, tp: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Where an interval of tp rank 0's share lies in the whole tensor, and the shift to rank 1.

    Where tp splits columns, rows count whole.
    """
    if tensor.tp_dim is None or tp == 1:
        yield low, high, 0
    elif tensor.tp_dim > 0:
        yield low * tp, high * tp, 0
    else:
        begin = 0
        for block in tensor.blocks:
            share = block // tp * tensor.cols
            start, end = max(low, begin), min(high, begin + share)
            if start < end:
                yield start + begin * (tp - 1), end + begin * (tp - 1), share
            begin += share
