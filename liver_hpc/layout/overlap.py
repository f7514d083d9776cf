"""How much of every target seat's state every source worker holds, for all pairs at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes, stage_shards
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec


def overlap_matrix(model: ModelSpec, source: Layout, target: Layout) -> NDArray[np.float64]:
    """Bytes of what a target rank needs that the worker at a source rank holds.

    [source.workers, target.workers], whole numbers.
    """
    sizes = (source.pp, source.dp, source.tp, target.pp, target.dp, target.tp)
    held = np.zeros(sizes)
    optimizer, *_ = model.optimizer_kinds
    optimizer_bytes = sum(model.element_bytes(kind) for kind in model.optimizer_kinds)
    for index in range(len(model.tensors)):
        for at, to, elements in _common(model, source, target, PARAMETER, index):
            # Every dp rank holds the same parameters.
            held[at.pp, :, at.tp, to.pp, :, to.tp] += elements * model.parameter_bytes
        for at, to, elements in _common(model, source, target, optimizer, index):
            held[at.pp, at.dp, at.tp, to.pp, to.dp, to.tp] += elements * optimizer_bytes
    return held.reshape(source.workers, target.workers)


def _common(
    model: ModelSpec, source: Layout, target: Layout, kind: str, index: int
) -> Iterator[tuple[Coordinate, Coordinate, int]]:
    """Elements that a box of the source and one of the target have in common."""
    needed = list(_boxes(model, target, kind, index))
    for at, have in _boxes(model, source, kind, index):
        for to, box in needed:
            part = have.intersect(box)
            if part is not None:
                yield at, to, part.elements


def _boxes(
    model: ModelSpec, layout: Layout, kind: str, index: int
) -> Iterator[tuple[Coordinate, Box]]:
    """All boxes of one kind of one tensor, and who owns them; parameters of the first dp rank."""
    for stage in model.stages_of(index, layout.pp):
        owners = stage_shards(model, layout, stage).owners(index)
        for dp in (0,) if kind == PARAMETER else owners:
            for tp in range(layout.tp):
                at = Coordinate(tp, stage, dp)
                for box in owned_boxes(model, layout, at, kind, index):
                    yield at, box
