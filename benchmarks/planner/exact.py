"""How far a placement is from the best one, box by box: for worlds of some dozen workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import subtract
from liver_hpc.layout.tensors import Box, ModelSpec

Lacks = Callable[[Coordinate, Sequence[int]], int]


def bytes_between_nodes(
    model: ModelSpec, source: RankMap, target: RankMap, nodes: Mapping[int, int]
) -> int:
    """Bytes that seats of the target need and nobody on their node holds."""
    on = _by_node(source.workers, nodes)
    lacks = lacking(model, source, target.layout)
    return sum(
        lacks(to, on.get(nodes[worker], ()))
        for worker, to in zip(target.workers, target.layout.coordinates(), strict=True)
    )


def least_bytes_between_nodes(
    model: ModelSpec,
    source: RankMap,
    target: Layout,
    available: Sequence[int],
    nodes: Mapping[int, int],
) -> int:
    """The least that any placement has whose groups of tp ranks, and with ep of all experts, are on
    one node each, for nodes that have room for them."""
    on, there = _by_node(source.workers, nodes), _by_node(available, nodes)
    lacks = lacking(model, source, target)
    block = target.tp * math.lcm(target.ep, target.cp)
    slots = [node for node, workers in there.items() for _ in range(len(workers) // block)]
    groups = [
        [
            at
            for at in target.coordinates()
            if at.pp == stage and at.replica // (block // target.tp) == number
        ]
        for stage in range(target.pp)
        for number in range(target.workers // target.pp // block)
    ]
    by_node = {
        node: [sum(lacks(to, on.get(node, ())) for to in group) for group in groups]
        for node in there
    }
    costs = np.array([by_node[node] for node in slots], dtype=np.float64)
    rows, columns = linear_sum_assignment(costs)
    if len(columns) < len(groups):
        raise ValueError(f"{target}: nodes have room for {len(slots)} of {len(groups)} groups")
    return sum(by_node[slots[row]][column] for row, column in zip(rows, columns, strict=True))


def lacking(model: ModelSpec, source: RankMap, target: Layout) -> Lacks:
    """Bytes that a seat needs and none of some workers holds."""

    def lacks(to: Coordinate, workers: Sequence[int]) -> int:
        seats = [at for worker in workers if (at := source.coordinate_of(worker)) is not None]
        total = 0
        for index in model.held_tensors(target, to):
            for kind in model.kinds:
                missing: Sequence[Box] = owned_boxes(model, target, to, kind, index)
                for at in seats:
                    for hole in owned_boxes(model, source.layout, at, kind, index):
                        missing = [part for box in missing for part in subtract(box, hole)]
                total += sum(box.elements for box in missing) * model.element_bytes(kind, index)
        return total

    return lacks


def _by_node(workers: Sequence[int], nodes: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for worker in workers:
        found.setdefault(nodes[worker], []).append(worker)
    return found
