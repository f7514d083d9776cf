"""A seat's model chunks in Megatron's DDP: built, checked against the run's spec, evaluated,
forgotten."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from liver_hpc.errors import PlanError
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.world import buffers, dropout, experts, megatron, memoryless, module_globals
from liver_hpc.world.buffers import BufferPlace
from liver_hpc.world.derive import build_chunks, chunk_shards, derivation_of
from liver_hpc.world.memoryless import Memoryless
from liver_hpc.world.sharded import Frame, state_tensors
from liver_hpc.world.shares import differences

_NAMED = 8
"""How many problems one error tells."""


Allocating = Callable[[], AbstractContextManager[Any]]
"""In whose context the tensors of a world's state are made."""

Wrapped = tuple[list[DistributedDataParallel], dict[int, torch.Tensor], dict[int, BufferPlace]]
"""A seat's chunks, its parameters and persistent buffers by tensor index, and where those of them
lie that are buffers."""


def wrapped(
    recipe: Recipe,
    seat: BuildContext,
    device: torch.device,
    worker: int,
    allocating: Allocating,
) -> Wrapped:
    """Builds a seat's chunks on a device. allocating: parameters and gradients of Megatron's DDP;
    those of the modules too, where it is `Memoryless`.

    Raises PlanError where the model is not what the recipe's spec says, or has state that is not
    moved.
    """
    layout, at, groups = seat.layout, seat.at, seat.groups
    train = recipe.config.train
    frame, modules = derivation_of(recipe, worker).frame, []
    with memoryless.parameters() if allocating is Memoryless else nullcontext():
        built = build_chunks(recipe, layout, at, groups)
        for module in built:
            module.to(device)
            megatron.complete_for_schedules(module)
            megatron.begin_gradients_at_layers(module)
            dropout.seed_at_layers(module, train.seed, at.tp, layout.sequence_parallel)
            experts.prepare(module)
            modules.append(megatron.in_low_precision(module))
        tensors = _verified(recipe, seat, built, frame)
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
    return chunks, tensors, held


def _verified(
    recipe: Recipe, seat: BuildContext, modules: Sequence[Any], frame: Frame
) -> dict[int, torch.Tensor]:
    """A seat's parameters and persistent buffers by tensor index, in the order of its modules.

    Whatever a handoff would lose or confuse is refused here, by name: the first time in a worker's
    boot, when nobody waits for it yet. Raises PlanError where tensors, their order, shares, roles
    or dtypes are not those of the spec, and for state that no handoff moves.
    """
    spec, layout, at = recipe.spec, seat.layout, seat.at
    shards = chunk_shards(modules, seat.groups, frame, layout)
    problems = [*differences(spec, layout, at, shards)]
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise PlanError(f"{layout}, stage {at.pp}: {'; '.join(problems[:_NAMED])}{more}")
    tensors = (tensor for module in modules for tensor in state_tensors(module).values())
    return dict(zip(spec.held_tensors(layout, at), tensors, strict=True))


@contextlib.contextmanager
def undisturbed(chunks: Sequence[Any]) -> Iterator[None]:
    """While it lasts, chunks compute as in validation, and no gradients. At its end everything is
    as it was: which parts train, buffers with routers' counts among them, random streams.

    Parameters must be up to date: none are gathered meanwhile. Not collective.
    """
    modes = [(part, part.training) for chunk in chunks for part in chunk.modules()]
    with buffers.kept(chunks), megatron.without_gathers(chunks), megatron.kept_streams():
        try:
            with torch.no_grad():
                for chunk in chunks:
                    chunk.eval()
                yield
        finally:
            for part, mode in modes:
                part.training = mode


def forget(chunks: Sequence[Any], groups: Any) -> None:
    """Drops what Megatron keeps of chunks, and with it their memory and connections. Worlds that
    train meanwhile lose nothing but what is computed again."""
    for part in [part for chunk in chunks for part in chunk.modules()]:
        # It has the probabilities of its last forward, and so the graph of that: a cycle through
        # autograd's own memory, which Python does not collect.
        dispatcher = getattr(part, "token_dispatcher", None)
        for name, value in vars(dispatcher).items() if dispatcher is not None else ():
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, None)
    clear_caches(chunks)
    module_globals.forget(groups)


def clear_caches(chunks: Iterable[Any]) -> None:
    """A method's cache keeps the object; rotary embeddings, which have one, keep a group, and
    tensors that were made in the lane of whoever asked first."""
    for layer in {type(part) for chunk in chunks for part in chunk.modules()}:
        for ancestor in layer.__mro__:
            for method in vars(ancestor).values():
                clear = getattr(method, "cache_clear", None)
                if callable(clear):
                    clear()
