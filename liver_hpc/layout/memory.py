"""How many bytes a coordinate holds, and how many bytes a handoff moves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import BUCKET_ALIGNMENT, buckets, local_shape, owned_boxes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, Move

GRADIENT = "gradient"


def worker_bytes(model: ModelSpec, layout: Layout, at: Coordinate) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state at a coordinate, by kind.

    Neither activations nor padding nor communication buffers are counted.
    """
    parameters, gradients = _of_all_replicas(model, layout, at)
    counted = {PARAMETER: parameters, GRADIENT: gradients}
    for kind in model.optimizer_kinds:
        counted[kind] = sum(
            box.elements * model.element_bytes(kind, index)
            for index in model.held_tensors(layout, at)
            for box in owned_boxes(model, layout, at, kind, index)
        )
    return counted


def _of_all_replicas(model: ModelSpec, layout: Layout, at: Coordinate) -> tuple[int, int]:
    """Bytes of parameters and of gradients, which every replica holds."""
    parameters = gradients = 0
    for index in model.held_tensors(layout, at):
        tensor = model.tensors[index]
        elements = math.prod(local_shape(tensor, layout.tp))
        parameters += elements * model.element_bytes(PARAMETER, index)
        gradients += elements * model.gradient_bytes if tensor.role == "trained" else 0
    return parameters, gradients


def stage_workers(model: ModelSpec, layout: Layout) -> list[dict[str, int]]:
    """The fullest worker of each stage, as `worker_bytes`; exact to within the padding between the
    optimizer's parameters."""
    # On one stage every tp rank holds as much, and every replica as much of each bucket.
    seats = [Coordinate(0, stage, 0) for stage in range(layout.pp)]
    return [worker_bytes(model, layout, seat) for seat in seats]


def stage_bytes(model: ModelSpec, layout: Layout) -> list[int]:
    """Bytes of state of the fullest worker of each stage."""
    return [sum(counted.values()) for counted in stage_workers(model, layout)]


def fullest_worker(model: ModelSpec, layout: Layout) -> dict[str, int]:
    """Bytes of state, by kind, of a layout's fullest worker."""
    return max(stage_workers(model, layout), key=lambda counted: sum(counted.values()))


_Fill = tuple[int, tuple[int, ...], tuple[int, ...]]
"""How much of its tensors the first of a bucket's ranks has: how many replicas have one rank; ends
of slices, and elements at each, in between as on a straight line."""


@lru_cache(maxsize=4096)
def _stage_kinds(model: ModelSpec, least: Layout) -> frozenset[tuple[int, int, tuple[_Fill, ...]]]:
    """Of each different stage: `_of_all_replicas`, and the optimizer's buckets."""
    found = set()
    for stage in range(least.pp):
        fills = [_fill(spans.values(), 1) for spans in buckets(model, least, stage)]
        if least.ep > 1:
            fills += [_fill(spans.values(), least.ep) for spans in buckets(model, least, stage, 0)]
        found.add((*_of_all_replicas(model, least, Coordinate(0, stage, 0)), tuple(fills)))
    return frozenset(found)


def _fill(spans: Iterable[tuple[int, int]], share: int) -> _Fill:
    ends, elements = [0], [0]
    for start, end in sorted(spans):
        ends += [start, end]
        elements += [elements[-1], elements[-1] + end - start]
    return share, tuple(ends), tuple(elements)


def stage_parts(
    model: ModelSpec, layout: Layout, replicas: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Bytes of parameters, of gradients and of optimizer state of each kind of stage's fullest
    worker, for a layout with each of some numbers of replicas, which its ep divides;
    [3, kinds of stages, numbers].

    Exact to within the padding between the optimizer's parameters.
    """
    found = []
    element_bytes = sum(model.element_bytes(kind, 0) for kind in model.optimizer_kinds)
    # On one stage every tp rank holds as much, and every replica as much of each bucket.
    for parameters, gradients, fills in _stage_kinds(model, layout.least):
        state = np.zeros(len(replicas))
        for share, ends, elements in fills:
            ranks = replicas // share
            whole = np.lcm(ranks, BUCKET_ALIGNMENT)
            slices = -(-ends[-1] // whole) * whole // ranks
            state += np.interp(slices, ends, elements)
        found.append(np.broadcast_arrays(parameters, gradients, element_bytes * state))
    return np.array(found).transpose(1, 0, 2)


def move_bytes(model: ModelSpec, moves: tuple[Move, ...]) -> int:
    """Bytes of a list of moves."""
    return sum(_bytes_of(model, move) for move in moves)


def _bytes_of(model: ModelSpec, move: Move) -> int:
    return move.box.elements * model.element_bytes(move.kind, move.tensor_index)


def bytes_by_receiver(model: ModelSpec, moves: tuple[Move, ...]) -> dict[int, int]:
    """Bytes of a list of moves, by the worker that they go to."""
    counted: Counter[int] = Counter()
    for move in moves:
        counted[move.receiver] += _bytes_of(model, move)
    return dict(sorted(counted.items()))


def handoff_bytes(model: ModelSpec, source: RankMap, target: RankMap) -> tuple[int, int, int]:
    """What a whole handoff moves between workers, what it copies within them, and how much of the
    former goes to another node, by its workers' plans."""
    on = dict(zip(source.workers, map(source.node_at, source.layout.coordinates()), strict=True))
    moved = local = between = 0
    for worker, to in zip(target.workers, target.layout.coordinates(), strict=True):
        plan, node = transfer_plan(model, source, target, worker), target.node_at(to)
        moved += move_bytes(model, plan.receives)
        between += move_bytes(model, tuple(m for m in plan.receives if on[m.sender] != node))
        local += move_bytes(model, plan.local)
    return moved, local, between
