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
    parameters = _common_bytes(model, source, target, PARAMETER)
    optimizer, *others = model.optimizer_kinds
    state = _common_bytes(model, source, target, optimizer) * (1 + len(others))
    return parameters[np.ix_(_seats(source), _seats(target))] + state


def _seats(layout: Layout) -> list[int]:
    """For each rank, the first one that holds the same parameters, counted among such."""
    return [_seat(layout, at) for at in layout.coordinates()]


def _seat(layout: Layout, at: Coordinate) -> int:
    return at.tp + layout.tp * (layout.ep_rank(at) + layout.ep * at.pp)


def _common_bytes(
    model: ModelSpec, source: Layout, target: Layout, kind: str
) -> NDArray[np.float64]:
    """Bytes of one kind that a holder of the source and one of the target have in common, for all
    pairs; holders are seats for parameters, ranks for optimizer state."""
    of_parameters = kind == PARAMETER
    holders, takers = (
        layout.tp * layout.pp * (layout.ep if of_parameters else layout.replicas)
        for layout in (source, target)
    )
    need = np.array(list(_boxes(model, target, kind)))
    common = np.zeros(holders * takers)
    have_all = np.array(list(_boxes(model, source, kind)))
    size = np.array([model.element_bytes(kind, index) for index in range(len(model.tensors))])
    for have in np.array_split(have_all, len(have_all) // _CHUNK_BOXES + 1):
        # Every box with every box of the same tensor: `ours` of the source, `theirs` of the target.
        first, end = (np.searchsorted(need[:, 0], have[:, 0], side) for side in ("left", "right"))
        counts = end - first
        ours = np.repeat(np.arange(len(have)), counts)
        theirs = np.arange(len(ours)) + np.repeat(end - np.cumsum(counts), counts)
        (index, at, *a), (_, to, *b) = have.T[:, ours], need.T[:, theirs]
        rows = np.minimum(a[1], b[1]) - np.maximum(a[0], b[0])
        cols = np.minimum(a[3], b[3]) - np.maximum(a[2], b[2])
        held = rows.clip(0) * cols.clip(0) * size[index]
        common += np.bincount(at * takers + to, held, minlength=len(common))
    return common.reshape(holders, takers)


def _boxes(model: ModelSpec, layout: Layout, kind: str) -> Iterator[tuple[int, ...]]:
    """(tensor index, holder, *box) of all boxes of one kind; see `_common_bytes`."""
    for index, tensor in enumerate(model.tensors):
        if kind != PARAMETER and tensor.role != "trained":
            continue
        home, holders = model.home(index, layout), model.holders(index, layout)
        for stage in model.stages_of(index, layout):
            if kind == PARAMETER:
                replicas = range(layout.ep) if home is None else range(home, home + 1)
            else:
                owners = stage_shards(model, layout, stage, home).owners(index)
                replicas = holders[owners.start : owners.stop]
            for replica in replicas:
                for tp in range(layout.tp):
                    at = Coordinate(tp, stage, replica)
                    holder = _seat(layout, at) if kind == PARAMETER else layout.rank(at)
                    for box in owned_boxes(model, layout, at, kind, index):
                        yield (index, holder, *box)
