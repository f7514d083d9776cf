"""Who writes which box, and who reads which part of it: pure functions of the two layouts.

Of every copy of the state the first one is written, by the coordinates that hold it, each what is
its own; so every element is in exactly one file, whichever layout was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import copies, copy_coordinates
from liver_hpc.layout.tensors import Box, ModelSpec


def written_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate
) -> Iterator[tuple[str, int, Box]]:
    """(kind, tensor index, box) of everything that a coordinate writes."""
    for kind in model.kinds:
        for index in model.stage_tensors(layout.pp, at.pp):
            copy = copies(model, layout, kind, index)[0]
            if at.pp == copy.stage and copy.tp in (None, at.tp) and copy.dp in (None, at.dp):
                for box in owned_boxes(model, layout, at, kind, index):
                    yield kind, index, box


@dataclass(frozen=True, order=True)
class Read:
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
            copy = copies(model, saved, kind, index)[0]
            parts = [
                Read(saved.rank(source), kind, index, own, part)
                for source in copy_coordinates(model, saved, index, copy, needed)
                for own in owned_boxes(model, saved, source, kind, index)
                for box in needed
                if (part := own.intersect(box)) is not None
            ]
            got, wanted = sum(r.part.elements for r in parts), sum(box.elements for box in needed)
            if got != wanted:
                raise PlanError(
                    f"{kind} of {model.tensors[index].name!r}: a checkpoint of {saved} holds {got} "
                    f"of the {wanted} elements that {at} of {layout} needs"
                )
            found += parts
    return sorted(found)
