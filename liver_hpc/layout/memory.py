"""How many bytes a coordinate holds, and how many bytes a handoff moves."""

from __future__ import annotations

import math
from collections import Counter

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.ownership import local_shape, owned_boxes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, Move

GRADIENT = "gradient"
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""


def worker_bytes(model: ModelSpec, layout: Layout, at: Coordinate) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state at a coordinate, by kind.

    Neither activations nor padding nor communication buffers are counted.
    """
    held = model.held_tensors(layout, at)
    counted = {PARAMETER: 0, GRADIENT: 0}
    for index in held:
        elements = math.prod(local_shape(model.tensors[index], layout.tp))
        counted[PARAMETER] += elements * model.element_bytes(PARAMETER, index)
        if model.tensors[index].role == "trained":
            counted[GRADIENT] += elements * GRADIENT_BYTES
    for kind in model.optimizer_kinds:
        counted[kind] = sum(
            box.elements * model.element_bytes(kind, index)
            for index in held
            for box in owned_boxes(model, layout, at, kind, index)
        )
    return counted


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


def handoff_bytes(model: ModelSpec, source: RankMap, target: RankMap) -> tuple[int, int]:
    """Bytes that cross between workers, and bytes copied within them, in a whole handoff."""
    moved = local = 0
    for worker in target.workers:
        plan = transfer_plan(model, source, target, worker)
        moved += move_bytes(model, plan.receives)
        local += move_bytes(model, plan.local)
    return moved, local
