"""The parameters that a module has, against those that its recipe describes.

Whatever a handoff would lose or confuse is refused here, by name, as a world is built: the first
time in a worker's boot, when nobody waits for it yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import ModelSpec, TensorSpec

NAMED = 8
"""How many problems one error tells."""


def described_parameters(
    spec: ModelSpec, layout: Layout, stage: int, module: torch.nn.Module
) -> dict[int, torch.nn.Parameter]:
    """A stage's parameters by tensor index, in the module's order.

    Raises PlanError where names, their order, or dtypes are not as described, and for state that
    no handoff moves: frozen parameters, persistent buffers, extra state.
    """
    indices = spec.stage_tensors(layout.pp, stage)
    tensors = [spec.tensors[index] for index in indices]
    parameters = dict(module.named_parameters())
    problems = [
        *_misnamed(tensors, sum(spec.stage_layers(layout.pp)[:stage]), list(parameters), stage),
        *_not_trained_alike(spec, parameters),
        *_not_moved(module),
    ]
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise PlanError(f"{layout}, stage {stage}: {'; '.join(problems[:NAMED])}{more}")
    return dict(zip(indices, parameters.values(), strict=True))


def _misnamed(
    tensors: Sequence[TensorSpec], layers_before: int, names: list[str], stage: int
) -> Iterator[str]:
    """Where names differ. A stage may count its layers from 0, as Megatron's do, or globally."""
    local = [_local_name(tensor, layers_before) for tensor in tensors]
    wanted = [tensor.name for tensor in tensors]
    for position, tensor in enumerate(tensors[: len(names)]):
        if tensor.tied_last and stage > 0:  # the copy has a name of its own (output_layer)
            local[position] = wanted[position] = names[position]
    if len(names) != len(wanted):
        yield (
            f"the model has {len(names)} parameters, the recipe describes {len(wanted)} (only in "
            f"the model: {sorted({*names} - {*local})[:NAMED]}, only described: "
            f"{sorted({*local} - {*names})[:NAMED]})"
        )
    elif names not in (local, wanted):
        for name, here, tensor in zip(names, local, tensors, strict=True):
            if name != here:
                called = tensor.name if here == tensor.name else f"{tensor.name}, here {here}"
                yield f"the model yields {name} where the recipe describes {called}"


def _local_name(tensor: TensorSpec, layers_before: int) -> str:
    """A layer's tensor with the layer's number on its stage: the first part of the name that is
    the global number."""
    if not isinstance(tensor.stage, int):
        return tensor.name
    parts, number = tensor.name.split("."), str(tensor.stage)
    if number in parts:
        parts[parts.index(number)] = str(tensor.stage - layers_before)
    return ".".join(parts)


def _not_trained_alike(spec: ModelSpec, parameters: dict[str, torch.nn.Parameter]) -> Iterator[str]:
    wanted = torch.float32 if spec.main_is_parameter else torch.bfloat16
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            yield f"{name} is frozen (requires_grad=False), and not moved by a handoff"
        if parameter.dtype != wanted:
            yield (
                f"{name} is {parameter.dtype}, the recipe's parameter_bytes="
                f"{spec.parameter_bytes} wants {wanted} for all"
            )


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
