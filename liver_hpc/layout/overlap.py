"""How much of every target seat's state every source worker holds, for all pairs at once.

Arrays hold what `owned_boxes` says of one coordinate, for all coordinates of a layout, because a
model of a hundred layers has ten thousands of boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ownership import local_shape, slabs, stage_shards
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, TensorSpec

Ints = NDArray[np.int64]

PAIRS_AT_ONCE = 1 << 20
"""Pairs of boxes that are compared at a time: some tens of MiB."""


@dataclass(frozen=True)
class BoxTable:
    """Boxes, sorted by tensor. owner, tensor: [n]; corners: [n, (row0, row1, col0, col1)]."""

    owner: Ints
    tensor: Ints
    corners: Ints

    @classmethod
    def of(cls, owner: Ints, tensor: Ints, corners: Ints) -> BoxTable:
        """The boxes that are not empty, sorted by tensor."""
        full = (corners[:, 0] < corners[:, 1]) & (corners[:, 2] < corners[:, 3])
        order = np.flatnonzero(full)[np.argsort(tensor[full], kind="stable")]
        return cls(owner[order], tensor[order], corners[order])

    def __len__(self) -> int:
        return len(self.owner)


def overlap_matrix(model: ModelSpec, source: Layout, target: Layout) -> NDArray[np.float64]:
    """Bytes of what a target rank needs that the worker at a source rank holds.

    [source.workers, target.workers], whole numbers.
    """
    # Every dp rank holds the same parameters: only tp ranks and stages are told apart.
    sizes = (source.pp, source.tp, target.pp, target.tp)
    parameters = _common_elements(
        _parameter_boxes(model, source),
        _parameter_boxes(model, target),
        (source.pp * source.tp, target.pp * target.tp),
    ).reshape(sizes)
    held_bytes = np.zeros((source.pp, source.dp, source.tp, target.pp, target.dp, target.tp))
    held_bytes += parameters[:, None, :, :, None, :] * model.element_bytes(PARAMETER)
    shards = _common_elements(
        _optimizer_boxes(model, source),
        _optimizer_boxes(model, target),
        (source.workers, target.workers),
    )
    shards *= sum(model.element_bytes(kind) for kind in model.optimizer_kinds)
    shards += held_bytes.reshape(shards.shape)
    return shards


def _common_elements(a: BoxTable, b: BoxTable, owners: tuple[int, int]) -> NDArray[np.float64]:
    """Elements that two owners have in common, summed over their boxes: [owners of a, of b]."""
    first = np.searchsorted(b.tensor, a.tensor, side="left")
    after = np.searchsorted(b.tensor, a.tensor, side="right")
    total = np.zeros(owners[0] * owners[1])
    for some in _batches(after - first):
        left, right = _ranges(first[some], after[some])
        left += some.start
        low = np.maximum(a.corners[left, ::2], b.corners[right, ::2])  # [pairs, (row0, col0)]
        high = np.minimum(a.corners[left, 1::2], b.corners[right, 1::2])
        elements = np.prod(np.maximum(high - low, 0), axis=1)
        pair = a.owner[left] * owners[1] + b.owner[right]
        total += np.bincount(pair, weights=elements, minlength=len(total))
    return total.reshape(owners)


def _batches(counts: Ints) -> Iterator[slice]:
    """Slices of neighbours whose counts add up to about `PAIRS_AT_ONCE`."""
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        limit = (ends[begin - 1] if begin else 0) + PAIRS_AT_ONCE
        end = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
        yield slice(begin, end)
        begin = end


def _ranges(first: Ints, after: Ints) -> tuple[Ints, Ints]:
    """All ranges [first, after) joined: for each number its range, and the number."""
    counts = after - first
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) + np.repeat(first - np.cumsum(counts) + counts, counts)


# ---- the boxes of a layout


@lru_cache(maxsize=16)
def _parameter_boxes(model: ModelSpec, layout: Layout) -> BoxTable:
    """Parameters by tp rank and stage; owner = stage * tp + tp rank."""
    slab = _slab_table(model, layout.tp)
    owner, tensor, corners = [], [], []
    for stage in range(layout.pp):
        held = np.isin(slab.tensor, np.array(model.stage_tensors(layout.pp, stage), dtype=np.int64))
        owner.append(stage * layout.tp + slab.tp_rank[held])
        tensor.append(slab.tensor[held])
        corners.append(slab.corners[held])
    return BoxTable.of(np.concatenate(owner), np.concatenate(tensor), np.concatenate(corners))


@lru_cache(maxsize=16)
def _optimizer_boxes(model: ModelSpec, layout: Layout) -> BoxTable:
    """Optimizer state by rank of the layout."""
    slab = _slab_table(model, layout.tp)
    owner, tensor, corners = [], [], []
    for stage in range(layout.pp):
        shard = _shard_table(model, layout, stage)
        # Each shard meets every slab of its tensor.
        first = np.searchsorted(slab.tensor, shard.tensor, side="left")
        after = np.searchsorted(slab.tensor, shard.tensor, side="right")
        which, place = _ranges(first, after)
        seat = layout.dp * stage + shard.dp_rank[which]
        for part in shard.boxes():
            owner.append(slab.tp_rank[place] + layout.tp * seat)
            tensor.append(shard.tensor[which])
            inside = _intersection(part[which], slab.local[place])
            corners.append(inside + slab.corners[place] - slab.local[place])
    return BoxTable.of(np.concatenate(owner), np.concatenate(tensor), np.concatenate(corners))


def _intersection(a: Ints, b: Ints) -> Ints:
    """Corners of the common boxes, [n, 4]; an empty one ends before it begins."""
    low, high = np.maximum(a, b), np.minimum(a, b)
    return np.stack([low[:, 0], high[:, 1], low[:, 2], high[:, 3]], axis=1)


@dataclass(frozen=True)
class _Slabs:
    """All slabs, sorted by tensor. tensor, tp_rank: [n]; corners (global), local: [n, 4]."""

    tensor: Ints
    tp_rank: Ints
    corners: Ints
    local: Ints


@lru_cache(maxsize=16)
def _slab_table(model: ModelSpec, tp: int) -> _Slabs:
    alike: dict[tuple[object, ...], Ints] = {}  # layers repeat each other's shapes
    columns = []
    for index, tensor in enumerate(model.tensors):
        key = (tensor.shape, tensor.tp_dim, tensor.tp_blocks)
        if key not in alike:
            alike[key] = _slabs_of(tensor, tp)
        columns.append(np.insert(alike[key], 0, index, axis=1))
    table = np.concatenate(columns)
    return _Slabs(table[:, 0], table[:, 1], table[:, 2:6], table[:, 6:10])


def _slabs_of(tensor: TensorSpec, tp: int) -> Ints:
    """[slabs, (tp rank, global corners, local corners)] of one tensor."""
    rows = [
        (rank, *slab.box, *slab.local_box())
        for rank in range(tp)
        for slab in slabs(tensor, tp, rank)
    ]
    return np.array(rows, dtype=np.int64)


@dataclass(frozen=True)
class _Shards:
    """Flat intervals [low, high) of local matrices that dp ranks own: [n] each."""

    tensor: Ints
    dp_rank: Ints
    low: Ints
    high: Ints
    cols: Ints

    def boxes(self) -> tuple[Ints, Ints, Ints]:
        """The first, middle and last box of each interval in its local matrix, [n, 4] each.

        The cuts are those of `ownership.interval_boxes`; a box that it does not make is empty.
        """
        row0, col0 = np.divmod(self.low, self.cols)
        row1, col1 = np.divmod(self.high, self.cols)
        one_row, begun = row0 == row1, col0 > 0
        zero = np.zeros_like(row0)
        first = (row0, row0 + (one_row | begun), col0, np.where(one_row, col1, self.cols))
        middle = (row0 + begun, row1, zero, self.cols)
        last = (row1, row1 + 1, zero, np.where(one_row, 0, col1))
        return np.stack(first, 1), np.stack(middle, 1), np.stack(last, 1)


def _shard_table(model: ModelSpec, layout: Layout, stage: int) -> _Shards:
    shards = stage_shards(model, layout, stage)
    rows = [
        (index, local_shape(model.tensors[index], layout.tp)[1], shards.bucket_elements[b], s, e)
        for index, (b, s, e) in shards.places.items()
    ]
    tensor, cols, bucket, start, end = np.array(rows, dtype=np.int64).T
    size = bucket // layout.dp
    which, dp_rank = _ranges(start // size, (end - 1) // size + 1)
    start, size = start[which], size[which]
    return _Shards(
        tensor[which],
        dp_rank,
        np.maximum(start, dp_rank * size) - start,
        np.minimum(end[which], (dp_rank + 1) * size) - start,
        cols[which],
    )
