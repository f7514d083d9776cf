"""Who writes which box, and who reads which part of it: pure functions of the two layouts.

Of every copy of the state the first one is written, by the coordinates that hold it, each what is
its own; so every element is in exactly one file, whichever layout was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import Copies
from liver_hpc.layout.tensors import Box, ModelSpec


def written_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate
) -> Iterator[tuple[str, int, Box]]:
    """(kind, tensor index, box) of everything that a coordinate writes."""
    for kind in model.kinds:
        for index in model.stage_tensors(layout.pp, at.pp):
            if Copies(model, layout, kind, index).number_at(at) == 0:
                for box in owned_boxes(model, layout, at, kind, index):
                    yield kind, index, box


class Read(NamedTuple):
    """`part` of the box `saved`, which rank `rank` of the saved layout wrote."""

    rank: int
    kind: str
    tensor_index: int
    saved: Box
    part: Box


def reads(model: ModelSpec, saved: Layout, layout: Layout, at: Coordinate) -> list[Read]:
    """All that a coordinate of `layout` reads of a checkpoint of `saved`, file by file.

    Raises PlanError where the checkpoint does not hold all that the coordinate needs.
    """
    found: list[Read] = []
    for kind in model.kinds:
        for index in model.stage_tensors(layout.pp, at.pp):
            needed = owned_boxes(model, layout, at, kind, index)
            parts = Copies(model, saved, kind, index).parts(0, needed, f"{at} of {layout}")
            found += [Read(saved.rank(by), kind, index, own, part) for by, own, part in parts]
    return sorted(found)
