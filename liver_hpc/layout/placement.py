"""Who sits where in the target: the seats with which the fewest bytes move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.overlap import overlap_matrix
from liver_hpc.layout.tensors import ModelSpec

EXACT_WORKERS = 64
"""The assignment is solved exactly up to this many workers or coordinates."""


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
    held = overlap_matrix(model, source.layout, target)
    stays = np.zeros((target.workers, len(available)))  # [seats, workers], bytes that stay
    for column, worker in enumerate(available):
        at = source.coordinate_of(worker)
        if at is not None:
            stays[:, column] = held[source.layout.rank(at)]
    _, columns = linear_sum_assignment(stays, maximize=True)
    return RankMap(target, tuple(available[column] for column in columns))


def _place_by_seat(source: RankMap, target: Layout, available: Sequence[int]) -> RankMap:
    """Keeps every worker whose seat exists in both layouts, then fills up in order."""
    free = set(available)
    seated: dict[Coordinate, int] = {}
    source_seats = {at: source.worker_at(at) for at in source.layout.coordinates()}
    for seat in target.coordinates():
        worker = source_seats.get(seat)
        if worker in free:
            seated[seat] = worker
            free.discard(worker)
    rest = iter([worker for worker in available if worker in free])
    return RankMap(
        target, tuple(seated[s] if s in seated else next(rest) for s in target.coordinates())
    )
