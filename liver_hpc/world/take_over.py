"""Memory that goes on into the target world where a worker keeps its share of the model.

Parameters of a buffer stay where stage and tensor-parallel share stay, optimizer state where its
interval stays too. The target's tensors are pointed at the source's memory while the source still
trains in it: nothing is copied, digested or held twice, and the way back is intact, because
nothing is written before the verdict but by the source's own updates. Persistent buffers are not
taken: a forward may write to them.

What in Megatron refers to a parameter's memory: the parameter, the buffer that it lies in, that
buffer's buckets and what is cached of them, and the optimizer's shard of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from liver_hpc.layout.tensors import MAIN, MOMENTS, PARAMETER
from liver_hpc.world import optimizer
from liver_hpc.world.optimizer import Holding
from liver_hpc.world.world import World


def take_over(target: World, source: World) -> set[tuple[str, int]]:
    """Points the target's tensors at the source's memory wherever both hold the same share, and
    frees what they had; returns what needs no move: kinds of state with the index of their tensor.
    Not collective; safe beside a thread that trains the source.

    The target must not be rehearsed any more.
    """
    theirs_by_tensors = {_indices(buffer, source): buffer for _, buffer in _buffers(source)}
    held, theirs_held = (optimizer.holdings(world.optimizers) for world in (target, source))
    low_precision = not target.recipe.spec.main_is_parameter
    taken: set[tuple[str, int]] = set()
    for chunk, mine in _buffers(target):
        indices = _indices(mine, target)
        theirs = theirs_by_tensors.get(indices)
        if theirs is None or not _same_share(indices, target, source):
            continue
        if not _same_places(mine, theirs):
            continue
        _spare(theirs.param_data, target)
        _point_buffer(mine, theirs.param_data, chunk, target)
        taken |= {(PARAMETER, index) for index in indices}
        for index in indices:
            mine_of = held.get(target.tensors[index], optimizer.NOTHING)
            theirs_of = theirs_held.get(source.tensors[index], optimizer.NOTHING)
            for kind in _take_optimizer_state(mine_of, theirs_of, low_precision, target):
                taken.add((kind, index))
    target.refresh_state()
    return taken


def _buffers(world: World) -> Iterator[tuple[Any, Any]]:
    """Each of Megatron's buffers of parameters and gradients, with its chunk."""
    for chunk in world.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield chunk, buffer


def _indices(buffer: Any, world: World) -> tuple[int, ...]:
    """The tensors of a buffer, in its order."""
    index_of = {parameter: index for index, parameter in world.tensors.items()}
    return tuple(index_of[parameter] for parameter in buffer.param_index_map)


def _same_share(indices: tuple[int, ...], one: World, other: World) -> bool:
    """Whether two worlds that hold these tensors hold the same part of each."""
    if (one.rank_map.layout.tp, one.at.tp) == (other.rank_map.layout.tp, other.at.tp):
        return True
    return all(one.recipe.spec.tensors[index].tp_dim is None for index in indices)


def _same_places(mine: Any, theirs: Any) -> bool:
    """Whether two buffers of the same tensors have them at the same places: the padding between
    them depends on the number of replicas."""
    one, other = mine.param_data, theirs.param_data
    return (
        (one.dtype, one.shape, one.storage_offset())
        == (other.dtype, other.shape, other.storage_offset())
        and [*mine.param_index_map.values()] == [*theirs.param_index_map.values()]
        and one.untyped_storage().nbytes() in (0, other.untyped_storage().nbytes())
    )


def _point_buffer(buffer: Any, memory: torch.Tensor, chunk: Any, target: World) -> None:
    """Points all of the target that lies in a buffer's parameters at `memory`, which is laid out
    alike, and frees what the buffer had."""
    before = buffer.param_data.untyped_storage()

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(memory, tensor.shape, tensor.stride(), tensor.storage_offset())

    with torch.no_grad():
        for parameter in buffer.param_index_map:
            parameter.data = there(parameter.data)
        for shard in _shards(target):
            if shard.untyped_storage()._cdata == before._cdata:
                shard.data = there(shard.data)
        for bucket in buffer.buckets:
            bucket.param_data = there(bucket.param_data)
    buffer.param_data = there(buffer.param_data)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.cached_param_buffer_shard_list = [None] * len(group.buckets)
    before.resize_(0)


def _shards(world: World) -> Iterator[torch.Tensor]:
    """The optimizer's views of parameters."""
    for one in world.optimizers:
        for groups in (one.shard_float16_groups, one.shard_fp32_groups):
            for group in groups:
                yield from (shard for shard in group if shard is not None)


def _spare(memory: torch.Tensor, target: World) -> None:
    """Before the target is pointed at some memory: it is not freed with it, whatever fails next."""
    target.taken |= {memory.untyped_storage().data_ptr()}


def _take_optimizer_state(
    mine: Holding, theirs: Holding, low_precision: bool, target: World
) -> Iterator[str]:
    """Takes a tensor's moments over, and its main copy in low precision, where both worlds hold the
    same interval of it; yields their kinds."""
    if mine.main is None or theirs.main is None or mine.interval != theirs.interval:
        return
    for kind in MOMENTS:
        _spare(theirs.state[kind], target)
        mine.state[kind].untyped_storage().resize_(0)
        mine.state[kind] = theirs.state[kind]
        yield kind
    if low_precision:
        _spare(theirs.main, target)
        mine.main.untyped_storage().resize_(0)
        mine.main.data = theirs.main.data
        yield MAIN
