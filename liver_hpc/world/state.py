"""The logical state of one world on one worker: tensors seen through global boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape, owned_boxes, slabs, stage_shards
from liver_hpc.layout.tensors import MAIN, PARAMETER, Box, ModelSpec, TensorSpec
from liver_hpc.protocol.messages import ClassDigest
from liver_hpc.transport.digest import box_digest

Initializer = Callable[[TensorSpec, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class HeldTensor:
    """One tensor of this worker's stage.

    parameter: the local share, [local rows, local cols] or 1-D.
    interval: the flat interval of it whose optimizer state lives here; empty when start >= end.
    optimizer: kind -> 1-D tensor of `interval`'s length; "main" in every precision.
    """

    parameter: torch.Tensor
    interval: tuple[int, int]
    optimizer: dict[str, torch.Tensor]


class WorldState:
    """A view of every box that this worker holds. Never communicates."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        at: Coordinate,
        held: dict[int, HeldTensor],
    ) -> None:
        self.model = model
        self.layout = layout
        self.at = at
        self._held = held
        self._check()

    def _check(self) -> None:
        """Raises PlanError where the real tensors are not what the layout says they are."""
        shards = stage_shards(self.model, self.layout, self.at.pp)
        for index in self.model.stage_tensors(self.layout.pp, self.at.pp):
            tensor = self.model.tensors[index]
            held = self._held.get(index)
            if held is None:
                raise PlanError(f"{self._where()}: the model has no tensor {tensor.name!r}")
            wanted = list(tensor.shape)
            if tensor.tp_dim is not None:
                wanted[tensor.tp_dim] //= self.layout.tp
            shape = list(held.parameter.shape)
            if shape != wanted:
                raise PlanError(
                    f"{self._where()}: {tensor.name!r} is {shape}, the layout wants {wanted}"
                )
            start, end = shards.interval(index, self.at.dp)
            if max(end - start, 0) != max(held.interval[1] - held.interval[0], 0) or (
                end > start and held.interval != (start, end)
            ):
                raise PlanError(
                    f"{self._where()}: optimizer state of {tensor.name!r} covers "
                    f"{held.interval}, the layout wants {(start, end)}"
                )

    def _where(self) -> str:
        return f"{self.layout} at tp {self.at.tp} pp {self.at.pp} dp {self.at.dp}"

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """The memory of one global box, [box rows, box cols]; writing to it changes the world.

        Raises PlanError when this worker does not hold the whole box.
        """
        tensor = self.model.tensors[tensor_index]
        held = self._held.get(tensor_index)
        if held is not None:
            for slab in slabs(tensor, self.layout.tp, self.at.tp):
                if slab.box.intersect(box) == box:
                    row = box.row0 - slab.box.row0 + slab.local_row
                    col = box.col0 - slab.box.col0 + slab.local_col
                    return self._strided(kind, tensor, held, (row, col), box)
        raise PlanError(f"{self._where()}: does not hold {kind} {box} of {tensor.name!r}")

    def _strided(
        self, kind: str, tensor: TensorSpec, held: HeldTensor, corner: tuple[int, int], box: Box
    ) -> torch.Tensor:
        height, width = box.row1 - box.row0, box.col1 - box.col0
        _, cols = local_shape(tensor, self.layout.tp)
        first = corner[0] * cols + corner[1]
        last = first + (height - 1) * cols + width
        start, end = (0, held.parameter.numel()) if kind == PARAMETER else held.interval
        if first < start or last > end:
            raise PlanError(f"{self._where()}: does not hold {kind} {box} of {tensor.name!r}")
        memory = held.parameter if kind == PARAMETER else held.optimizer[kind]
        return torch.as_strided(
            memory, (height, width), (cols, 1), memory.storage_offset() + first - start
        )

    def boxes(self, kind: str) -> Iterator[tuple[int, Box]]:
        """Yields every (tensor index, box) of one kind that this worker owns."""
        for index in self.model.stage_tensors(self.layout.pp, self.at.pp):
            for box in owned_boxes(self.model, self.layout, self.at, kind, index):
                yield index, box

    def digests(self, kinds: Iterable[str]) -> tuple[ClassDigest, ...]:
        """Digests of what this worker owns, one for each kind and replication class
        (protocol/votes.py). Waits for the device."""
        totals: dict[tuple[str, bool, bool], int] = {}
        for kind in kinds:
            for index, box in self.boxes(kind):
                tensor = self.model.tensors[index]
                key = (kind, tensor.tp_dim is None, tensor.tied)
                value = box_digest(self.view(kind, index, box), tensor.name, box)
                totals[key] = (totals.get(key, 0) + value) % 2**64
        return tuple(
            ClassDigest(kind=kind, tp_replicated=replicated, multi_stage=multi, value=f"{v:016x}")
            for (kind, replicated, multi), v in sorted(totals.items())
        )

    def initialize(self, initial: Initializer, seed: int) -> None:
        """Fills parameters and the main copy with their first values, the moments with zeros.

        A tensor's values are a function of (seed, name), so they are the same for every layout.
        """
        main_apart = not self.model.main_is_parameter
        for index in self.model.stage_tensors(self.layout.pp, self.at.pp):
            tensor = self.model.tensors[index]
            hashed = hashlib.blake2b(f"{seed}/{tensor.name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") >> 1)
            whole = initial(tensor, generator).reshape(tensor.rows, tensor.cols)
            for kind in (PARAMETER, MAIN) if main_apart else (PARAMETER,):
                for box in owned_boxes(self.model, self.layout, self.at, kind, index):
                    part = whole[box.row0 : box.row1, box.col0 : box.col1]
                    self.view(kind, index, box).copy_(part)
            for kind, memory in self._held[index].optimizer.items():
                if kind != MAIN:
                    memory.zero_()

    def release(self) -> None:
        """Frees the memory at once, even while somebody still refers to the tensors."""
        for held in self._held.values():
            for memory in (held.parameter, *held.optimizer.values()):
                memory.untyped_storage().resize_(0)
        self._held.clear()
