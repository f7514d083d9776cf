"""A seat's model chunks in Megatron's DDP, checked against the run's spec."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.world import buffers, dropout, experts, megatron
from liver_hpc.world.buffers import BufferPlace
from liver_hpc.world.derive import build_chunks, derivation_of
from liver_hpc.world.verified import verified_tensors


class Wrapped(NamedTuple):
    """A seat's chunks, its parameters and persistent buffers by tensor index, and where those of
    them lie that are buffers."""

    chunks: list[DistributedDataParallel]
    tensors: dict[int, torch.Tensor]
    buffers: dict[int, BufferPlace]


def wrapped(
    recipe: Recipe,
    seat: BuildContext,
    device: torch.device,
    worker: int,
    allocating: Callable[[], AbstractContextManager[None]],
) -> Wrapped:
    """Builds a seat's chunks on a device. allocating: of gradients.

    Raises PlanError where the model is not what the recipe's spec says, or has state that is not
    moved.
    """
    layout, at, groups = seat.layout, seat.at, seat.groups
    train = recipe.config.train
    built = build_chunks(recipe, layout, at, groups)
    modules = []
    for module in built:
        module.to(device)
        megatron.complete_for_schedules(module)
        megatron.begin_gradients_at_layers(module)
        dropout.seed_at_layers(module, train.seed, at.tp, layout.sequence_parallel)
        experts.prepare(module)
        modules.append(megatron.in_low_precision(module))
    frame = derivation_of(recipe, worker).frame
    tensors = verified_tensors(recipe.spec, layout, at, built, groups, frame)
    for index, tensor in tensors.items():
        megatron.mark_tensor_parallel(tensor, recipe.spec.tensors[index])
    places = {id(place.tensor): place for place in buffers.all_buffers(built)}
    held = {index: places[id(one)] for index, one in tensors.items() if id(one) in places}
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not train.grad_reduce_in_bf16,
        use_distributed_optimizer=True,
        overlap_grad_reduce=train.overlap_grad_reduce,
        overlap_param_gather=train.overlap_param_gather,
        bucket_size=train.bucket_elements,
        check_for_nan_in_grad=recipe.checks_gradients(),
    )
    with allocating():
        chunks = [
            DistributedDataParallel(
                copy.copy(module.config),  # which gets this world's own functions
                options,
                module,
                disable_bucketing=number > 0,
                pg_collection=groups,
            )
            for number, module in enumerate(modules)
        ]
    for chunk in chunks:
        megatron.configure_for_schedules(chunk.config, chunks, layout)
    return Wrapped(chunks, tensors, held)
