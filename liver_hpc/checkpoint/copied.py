"""What a worker writes of a checkpoint, and its copy in host memory: training goes on meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from liver_hpc.errors import CheckpointError, PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import Copies
from liver_hpc.layout.tensors import Box, ModelSpec
from liver_hpc.world.host_memory import NewMemory, in_one_run, plain_memory
from liver_hpc.world.state import WorldState


def written_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate
) -> Iterator[tuple[str, int, Box]]:
    """(kind, tensor index, box) of everything that a coordinate writes: of every copy of the state
    the first one, by the coordinates that hold it, each what is its own; so every element is in
    exactly one file."""
    for kind in model.kinds:
        for index in model.held_tensors(layout, at):
            if Copies(model, layout, kind, index).number_at(at) == 0:
                for box in owned_boxes(model, layout, at, kind, index):
                    yield kind, index, box


class HostCopy:
    """The boxes that one worker writes, in memory that `new_memory` gives. given_up: why nobody
    wants it any more, else empty; whoever reads it then, or still takes it, gets a
    CheckpointError."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        at: Coordinate,
        new_memory: NewMemory = plain_memory,
    ) -> None:
        self.model, self.layout, self.at = model, layout, at
        self._new_memory = new_memory
        self.given_up = ""
        self._held: dict[tuple[str, int], list[tuple[Box, torch.Tensor]]] = defaultdict(list)

    def take(self, state: WorldState) -> None:
        """Copies; on CUDA in the calling thread's lane, which is not waited for."""
        boxes = [*written_boxes(self.model, self.layout, self.at)]
        views = [state.view(kind, index, box) for kind, index, box in boxes]
        parts = in_one_run([view.nbytes for view in views], self._new_memory)
        for (kind, index, box), view, part in zip(boxes, views, parts, strict=True):
            self._check()
            memory = part.view(view.dtype).view(box.shape)
            self._held[kind, index].append((box, memory.copy_(view, non_blocking=True)))

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """The copy of a box, or of a part of one. Raises PlanError for what is not held."""
        self._check()
        for held, memory in self._held.get((kind, tensor_index), ()):
            if held.intersect(box) == box:
                rows = memory[box.row0 - held.row0 : box.row1 - held.row0]
                return rows[:, box.col0 - held.col0 : box.col1 - held.col0]
        name = self.model.tensors[tensor_index].name
        raise PlanError(f"the copy at {self.at} of {self.layout} lacks {kind} {box} of {name!r}")

    def release(self) -> None:
        self._held.clear()

    def _check(self) -> None:
        if self.given_up:
            raise CheckpointError(f"given up: {self.given_up}")


BoxView = WorldState | HostCopy
"""What a part is written from."""
