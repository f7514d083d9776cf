"""Which boxes a worker writes: a pure function of the layout. Of every copy of the state the first
one is written, by the coordinates that hold it, each what is its own; so every element is in
exactly one file."""

from __future__ import annotations

from collections.abc import Iterator

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import Copies
from liver_hpc.layout.tensors import Box, ModelSpec


def written_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate
) -> Iterator[tuple[str, int, Box]]:
    """(kind, tensor index, box) of everything that a coordinate writes."""
    for kind in model.kinds:
        for index in model.held_tensors(layout, at):
            if Copies(model, layout, kind, index).number_at(at) == 0:
                for box in owned_boxes(model, layout, at, kind, index):
                    yield kind, index, box
