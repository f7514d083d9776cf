"""A worker's real module against the spec that was derived before the run.

Whatever a handoff would lose or confuse is refused here, by name, as a world is built: the first
time in a worker's boot, when nobody waits for it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.world.derive import is_share
from liver_hpc.world.sharded import Frame, Part, parts_of, whole_of

NAMED = 8
"""How many problems one error tells."""


def verified_parameters(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinate,
    module: torch.nn.Module,
    groups: Any,
    frame: Frame,
) -> dict[int, torch.nn.Parameter]:
    """A seat's parameters by tensor index, in the module's order.

    groups: those that the module was built with. Raises PlanError where tensors, their order,
    shares or dtypes are not those of the spec, and for state that no handoff moves: frozen
    parameters, persistent buffers, extra state.
    """
    indices = spec.stage_tensors(layout.pp, at.pp)
    parameters = dict(module.named_parameters())
    problems = [*_not_trained_alike(spec, parameters), *_not_moved(module)]
    if not problems:
        parts = parts_of(module, groups, frame)
        problems += _not_as_derived(spec, layout, at, indices, parts)
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise PlanError(f"{layout}, stage {at.pp}: {'; '.join(problems[:NAMED])}{more}")
    return dict(zip(indices, parameters.values(), strict=True))


def _not_as_derived(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinate,
    indices: tuple[int, ...],
    parts: dict[str, tuple[Part, ...]],
) -> Iterator[str]:
    if len(parts) != len(indices):
        yield f"the model has {len(parts)} parameters, the run's spec {len(indices)}"
        return
    for (name, held), index in zip(parts.items(), indices, strict=True):
        tensor, whole = spec.tensors[index], whole_of(name, held)
        if whole != tensor.name:
            called = "" if name == whole else f", as {name},"
            yield f"the model yields {whole}{called} where the run's spec has {tensor.name}"
            continue
        split = None if tensor.tp_dim is None else (tensor.tp_dim, tensor.tp_blocks)
        if not is_share(held, tensor.shape, split, layout.tp, at.tp):
            yield f"{name} holds {held}, which is not the share of tp rank {at.tp} of {tensor}"


def _not_trained_alike(spec: ModelSpec, parameters: dict[str, torch.nn.Parameter]) -> Iterator[str]:
    wanted = torch.float32 if spec.main_is_parameter else torch.bfloat16
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            yield f"{name} is frozen (requires_grad=False), and not moved by a handoff"
        if parameter.dtype != wanted:
            yield f"{name} is {parameter.dtype}, where all parameters are to be {wanted}"


def _not_moved(module: torch.nn.Module) -> Iterator[str]:
    """What `state_dict` holds beside parameters: persistent buffers, and extra state (FP8)."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        empty = value is None or (isinstance(value, torch.Tensor) and not value.numel())
        if name not in parameters and not empty:
            yield (
                f"{name} is not moved by a handoff, as it is no parameter; register a buffer that "
                "can be recomputed with persistent=False"
            )
