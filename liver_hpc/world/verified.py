"""A worker's real modules against the spec that was derived before the run.

Whatever a handoff would lose or confuse is refused here, by name, as a world is built: the first
time in a worker's boot, when nobody waits for it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.world.derive import chunk_shards
from liver_hpc.world.sharded import Frame, state_tensors
from liver_hpc.world.shares import differences

NAMED = 8
"""How many problems one error tells."""


def verified_tensors(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinate,
    modules: Sequence[torch.nn.Module],
    groups: Any,
    frame: Frame,
) -> dict[int, torch.Tensor]:
    """A seat's parameters and persistent buffers by tensor index, in the order of its modules.

    groups: those that the modules were built with. Raises PlanError where tensors, their order,
    shares, roles or dtypes are not those of the spec, and for state that no handoff moves.
    """
    chunks = chunk_shards(modules, groups, frame, layout)
    problems = [*differences(spec, layout, at, chunks)]
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise PlanError(f"{layout}, stage {at.pp}: {'; '.join(problems[:NAMED])}{more}")
    tensors = (tensor for module in modules for tensor in state_tensors(module).values())
    return dict(zip(spec.held_tensors(layout, at), tensors, strict=True))
