"""Who sits where in the target: the seats with which the fewest bytes move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import owned_boxes, stage_shards
from liver_hpc.layout.tensors import PARAMETER, ModelSpec

EXACT_WORKERS = 64
"""The assignment is solved exactly up to this many workers or coordinates."""
_CHUNK_BOXES = 2048
"""How many of the source's boxes are held against the target's at a time."""


def place(model: ModelSpec, source: RankMap, target: Layout, available: Sequence[int]) -> RankMap:
    """Seats `target.workers` of the `available` workers so that the fewest bytes move.

    `available` may hold more workers than needed (the rest leave) and workers that are not in
    the source (joiners). Deterministic. Raises ConfigError when there are too few.
    """
    if len(available) < target.workers:
        raise ConfigError(
            f"layout {target} wants {target.workers} workers, available are {list(available)}"
        )
    if max(len(available), target.workers) <= EXACT_WORKERS:
        return _place_exactly(model, source, target, available)
    return _place_by_seat(source, target, available)


def _place_exactly(
    model: ModelSpec, source: RankMap, target: Layout, available: Sequence[int]
) -> RankMap:
    joiner = np.zeros(target.workers)
    held = np.vstack([overlap_matrix(model, source.layout, target), joiner])
    ranks = {worker: rank for rank, worker in enumerate(source.workers)}
    # [seats, workers], bytes that stay
    stays = held[[ranks.get(worker, len(ranks)) for worker in available]].T
    _, columns = linear_sum_assignment(stays, maximize=True)
    return RankMap(target, tuple(available[column] for column in columns))


def _place_by_seat(source: RankMap, target: Layout, available: Sequence[int]) -> RankMap:
    """Keeps every worker whose seat exists in both layouts, then fills up in order."""
    workers = dict(zip(source.layout.coordinates(), source.workers, strict=True))
    free = set(available)
    seated = {at: workers[at] for at in target.coordinates() if workers.get(at) in free}
    free -= set(seated.values())
    rest = iter([worker for worker in available if worker in free])
    return RankMap(
        target, tuple(seated[s] if s in seated else next(rest) for s in target.coordinates())
    )


def overlap_matrix(model: ModelSpec, source: Layout, target: Layout) -> NDArray[np.float64]:
    """Bytes of what a target rank needs that the worker at a source rank holds.

    [source.workers, target.workers], whole numbers.
    """
    optimizer, *_ = model.optimizer_kinds
    optimizer_bytes = sum(model.element_bytes(kind) for kind in model.optimizer_kinds)
    axes = (source.pp, source.dp, source.tp, target.pp, target.dp, target.tp)
    parameters = _common_elements(model, source, target, PARAMETER).reshape(axes)
    state = _common_elements(model, source, target, optimizer).reshape(axes)
    # Every dp rank holds the parameters that the first one holds.
    held = parameters[:, :1, :, :, :1] * model.parameter_bytes + state * optimizer_bytes
    return held.reshape(source.workers, target.workers)


def _common_elements(
    model: ModelSpec, source: Layout, target: Layout, kind: str
) -> NDArray[np.float64]:
    """Elements of one kind that a source rank and a target rank have in common, for all pairs."""
    need = np.array(list(_boxes(model, target, kind)))
    common = np.zeros(source.workers * target.workers)
    have_all = np.array(list(_boxes(model, source, kind)))
    for have in np.array_split(have_all, len(have_all) // _CHUNK_BOXES + 1):
        # Every box with every box of the same tensor: `ours` of the source, `theirs` of the target.
        first, end = (np.searchsorted(need[:, 0], have[:, 0], side) for side in ("left", "right"))
        counts = end - first
        ours = np.repeat(np.arange(len(have)), counts)
        theirs = np.arange(len(ours)) + np.repeat(end - np.cumsum(counts), counts)
        (_, at, *a), (_, to, *b) = have.T[:, ours], need.T[:, theirs]
        rows = np.minimum(a[1], b[1]) - np.maximum(a[0], b[0])
        cols = np.minimum(a[3], b[3]) - np.maximum(a[2], b[2])
        elements = rows.clip(0) * cols.clip(0)
        common += np.bincount(at * target.workers + to, elements, minlength=len(common))
    return common


def _boxes(model: ModelSpec, layout: Layout, kind: str) -> Iterator[tuple[int, ...]]:
    """(tensor index, rank, *box) of all boxes of one kind; parameters of the first dp rank."""
    for index, tensor in enumerate(model.tensors):
        for stage in model.stages_of(tensor, layout.pp):
            owners = stage_shards(model, layout, stage).owners(index)
            for dp in (0,) if kind == PARAMETER else owners:
                for tp in range(layout.tp):
                    at = Coordinate(tp, stage, dp)
                    for box in owned_boxes(model, layout, at, kind, index):
                        yield (index, layout.rank(at), *box)
