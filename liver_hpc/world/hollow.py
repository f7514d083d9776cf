"""A world's memory, kind by kind: a world that is built beside another one has none at first.

Parameters and gradients lie in Megatron's buffers, optimizer state in a tensor a shard. All of them
are views of storages, which give their memory back and get it again without anybody who refers to
them being told (`UntypedStorage.resize_`).
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch

from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.world.world import World


def free(world: World, kind: str, spared: Set[int] = frozenset()) -> None:
    """Gives the memory of one kind of state, or of the gradients, back. spared: addresses of
    storages that another world has too."""
    for storage, _ in _storages(world, kind):
        if storage.data_ptr() not in spared:
            storage.resize_(0)


def allocate(world: World, kind: str) -> None:
    """Gives one kind the memory that it lacks, all zeros."""
    for storage, num_bytes in _storages(world, kind):
        if storage.nbytes() < num_bytes:
            storage.resize_(num_bytes)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            whole.set_(storage).zero_()


def hollow(world: World) -> None:
    """Gives all memory back but what is taken over from another world."""
    for kind in (GRADIENT, *world.recipe.spec.kinds):
        free(world, kind, world.taken)


def _storages(world: World, kind: str) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The memory of a kind, and how many bytes its tensors reach into it; buffers that are no
    parameters stay."""
    for tensor in _tensors(world, kind):
        reach = (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
        yield tensor.untyped_storage(), reach


def _tensors(world: World, kind: str) -> Iterator[torch.Tensor]:
    if kind in (GRADIENT, PARAMETER):
        for chunk in world.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data if kind == GRADIENT else buffer.param_data
    if kind == PARAMETER:
        spec = world.recipe.spec
        yield from (t.data for i, t in world.tensors.items() if spec.tensors[i].role == "frozen")
    elif kind != GRADIENT:
        yield from world.state.memory(kind)
