"""Seats that this process has rehearsed. A second one of the same shapes runs the same kernels, so
nothing is left to be compiled, chosen or cached for it. Processes that are forked know it, too.

On a CPU nothing is made for shapes, unless torch compiles the model's code: there one rehearsal is
enough for a process, of whatever seat.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from liver_hpc.layout.coordinates import Coordinate, Layout

_rehearsed: set[Shapes] = set()
_devices: set[str] = set()
"""On which types of device a step has been rehearsed, whatever its shapes."""


@dataclass(frozen=True)
class Shapes:
    """What the kernels of a step depend on.

    model: digest of its spec. tensors: shape and dtype of each that the seat holds. ends: whether
    the seat is in the first stage, and in the last one. layout: of it, what splits activations or
    chooses the schedule.
    """

    model: str
    micro_batch: int
    layout: tuple[int | bool, ...]
    ends: tuple[bool, bool]
    tensors: tuple[tuple[tuple[int, ...], str], ...]

    @classmethod
    def of_seat(
        cls,
        model: str,
        micro_batch: int,
        layout: Layout,
        at: Coordinate,
        tensors: Iterable[torch.Tensor],
    ) -> Shapes:
        return cls(
            model,
            micro_batch,
            (layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.vpp, layout.pp > 1),
            (at.pp == 0, at.pp == layout.pp - 1),
            tuple(sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors)),
        )


def remember(shapes: Shapes, device: torch.device) -> None:
    _rehearsed.add(shapes)
    _devices.add(device.type)


def known(shapes: Shapes, device: torch.device) -> bool:
    """Whether the process has nothing to learn from a rehearsal of this seat."""
    if device.type == "cuda" or _torch_compiles():
        return shapes in _rehearsed
    return device.type in _devices


def _torch_compiles() -> bool:
    """Whether torch has compiled any code in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported where nothing was compiled
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0
