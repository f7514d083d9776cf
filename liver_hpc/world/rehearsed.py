"""Seats that this process has rehearsed. A second one of the same shapes runs the same kernels, so
nothing is left to be compiled, chosen or cached for it. Processes that are forked know it, too.

On a CPU nothing is made for shapes, as torch.compile is the identity there (`cpu_shim.py`): one
rehearsal is enough for a process, of whatever seat, and what it has imported is enough for those
that are forked from it (`worker/warm.py`).
"""

from __future__ import annotations

import torch

from liver_hpc.config.schema import HandoffSection
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape
from liver_hpc.layout.tensors import PARAMETER, ModelSpec

Shapes = tuple[object, ...]

_rehearsed: set[Shapes] = set()
_all_imported = False


def shapes_of(model: ModelSpec, micro_batch: int, layout: Layout, at: Coordinate) -> Shapes:
    """What the kernels of a step depend on, of a seat that need not have been built: shapes of the
    tensors that it holds, and bytes of an element; whether it is in the first stage, and in the
    last one; and of the layout what splits activations or chooses the schedule."""
    held = sorted(
        (local_shape(model.tensors[index], layout.tp), model.element_bytes(PARAMETER, index))
        for index in model.held_tensors(layout, at)
    )
    splits = (layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.vpp, layout.pp > 1)
    ends = (at.pp == 0, at.pp == layout.pp - 1)
    return (model.digest, micro_batch, splits, ends, tuple(held))


def remember(shapes: Shapes) -> None:
    _rehearsed.add(shapes)


def remember_imports() -> None:
    """All has been imported here that a rehearsal imports."""
    global _all_imported
    _all_imported = True


def all_known(device: torch.device) -> bool:
    """Whether the process has nothing to learn from the rehearsal of any seat."""
    return device.type == "cpu" and (_all_imported or bool(_rehearsed))


def wanted(handoff: HandoffSection, device: torch.device) -> bool:
    """Whether some seat is to be rehearsed in this process."""
    return handoff.warm_up and (handoff.warm_up_again or not all_known(device))


def known(shapes: Shapes, device: torch.device) -> bool:
    """Whether the process has nothing to learn from a rehearsal of this seat."""
    return shapes in _rehearsed or all_known(device)
