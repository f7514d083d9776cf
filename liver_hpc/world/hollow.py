"""A world's memory, kind by kind: a world that is built beside another one has none at first, one
that takes the place of another one may have what that had.

Parameters and gradients lie in Megatron's buffers, optimizer state in a tensor a shard. All of them
are views of storages, which give their memory back and get it again without anybody who refers to
them being told (`UntypedStorage.resize_`). Buffers of the model that are no parameters stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import torch

from liver_hpc.host.pages import AT_ONCE_BYTES, populate
from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.world.untouched import Kept
from liver_hpc.world.world import World


def hollow(world: World) -> None:
    """Gives all memory back but what is taken over from another world."""
    free(world, (GRADIENT, *world.recipe.spec.kinds), world.taken)


def free(world: World, kinds: Iterable[str], spared: Set[int] = frozenset()) -> None:
    """Gives the memory of kinds of state, or of the gradients, back; idempotent. spared: addresses
    of storages that another world has too."""
    for kind in kinds:
        for tensor in _tensors(world, kind):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in spared:
                storage.resize_(0)


def allocate(world: World, kinds: Iterable[str]) -> None:
    """Gives kinds of state, or the gradients, the memory that they lack. Its pages are there, but
    only gradients are zeros."""
    for kind in kinds:
        zeros = kind == GRADIENT
        lacked = [_allocate(tensor, zeros) for tensor in _tensors(world, kind)]
        if zeros:
            world.gradients_are_clear = all(lacked)


def _allocate(tensor: torch.Tensor, zeros: bool) -> bool:
    storage = tensor.untyped_storage()
    # A kind's tensors may share one storage; each reaches as far into it as it reaches.
    reach = (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
    if storage.nbytes() >= reach:
        return False
    storage.resize_(reach)
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if memory.is_cuda:
        memory.zero_()
        return True
    for part in torch.split(memory, AT_ONCE_BYTES):  # which is in the cache still
        if not populate(part.data_ptr(), part.nbytes) or zeros:
            part.zero_()
    return True


def let_go(worlds: Iterable[World]) -> Kept:
    """Closes worlds; their memory is kept for the next one."""
    held: list[torch.Tensor] = []
    for world in worlds:
        kinds = (GRADIENT, *world.recipe.spec.kinds)
        mine = [tensor for kind in kinds for tensor in _tensors(world, kind)]
        world.close(frozenset(tensor.untyped_storage().data_ptr() for tensor in mine))
        held += mine
    return Kept(held)


def _tensors(world: World, kind: str) -> Iterator[torch.Tensor]:
    """The tensors in whose storages all of a kind lies."""
    if kind in (GRADIENT, PARAMETER):
        for chunk in world.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data if kind == GRADIENT else buffer.param_data
    if kind == PARAMETER:
        spec = world.recipe.spec
        yield from (t.data for i, t in world.tensors.items() if spec.tensors[i].role == "frozen")
    elif kind != GRADIENT:
        yield from world.state.memory(kind)
