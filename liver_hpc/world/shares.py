"""How tensor parallelism splits a tensor, and whether a seat holds what the spec says."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.world.sharded import Part, Shards, whole_of


def split_of(
    name: str, shape: tuple[int, ...], tp: int, parts: tuple[Part, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """How a tensor is split, from what the first rank holds of it: the dimension, and the sizes of
    the blocks along it, each of which is split on its own. None where the rank holds all of it."""
    dims = {
        dim
        for part in parts
        for dim, ((_, length), size) in enumerate(zip(part.whole, shape, strict=True))
        if length != size
    }
    if not dims:
        return None
    if len(dims) > 1:
        raise PlanError(f"{name} is split along dimensions {sorted(dims)}: {parts}")
    dim = dims.pop()
    blocks = tuple(part.whole[dim][1] * tp for part in sorted(parts))
    return dim, blocks


def is_share(
    parts: tuple[Part, ...],
    shape: tuple[int, ...],
    split: tuple[int, tuple[int, ...]] | None,
    tp: int,
    rank: int,
) -> bool:
    """Whether these parts are what a rank holds of a tensor that is split so."""
    if split is None:
        elements = sum(math.prod(length for _, length in part.whole) for part in parts)
        return elements == math.prod(shape) and all(part.local == part.whole for part in parts)
    dim, blocks = split
    ends = tuple(itertools.accumulate(blocks))
    ranges = [
        ((end - block) // tp, end - block + rank * (block // tp), block // tp)
        for block, end in zip(blocks, ends, strict=True)
    ]
    held = [(part.local[dim][0], part.whole[dim][0], part.whole[dim][1]) for part in sorted(parts)]
    others = [
        part.local[:dim] + part.local[dim + 1 :] == part.whole[:dim] + part.whole[dim + 1 :]
        for part in parts
    ]
    return held == ranges and ends[-1] == shape[dim] and all(others)


def differences(
    spec: ModelSpec, layout: Layout, at: Coordinate, chunks: Sequence[Shards]
) -> Iterator[str]:
    """How what the chunks of a seat hold differs from what the spec says, tensor by tensor."""
    indices = spec.held_tensors(layout, at)
    held = [item for chunk in chunks for item in chunk.items()]
    if len(held) != len(indices):
        named = Counter(whole_of(name, shard.parts) for name, shard in held)
        specified = Counter(spec.tensors[index].name for index in indices)
        for who, lacks in (("model", specified - named), ("run's spec", named - specified)):
            if lacks:
                yield f"the {who} lacks {', '.join(lacks.elements())}"
        return
    for (name, shard), index in zip(held, indices, strict=True):
        tensor, whole = spec.tensors[index], whole_of(name, shard.parts)
        called = "" if name == whole else f", as {name},"
        if whole != tensor.name:
            yield f"the model yields {whole}{called} where the run's spec has {tensor.name}"
            continue
        if shard.role != tensor.role:
            yield f"{whole}{called} is {shard.role}, in the run's spec {tensor.role}"
        element_bytes = spec.element_bytes(PARAMETER, index)
        if shard.element_bytes != element_bytes:
            yield (
                f"{whole}{called} has elements of {shard.element_bytes} bytes, in the run's spec "
                f"of {element_bytes}"
            )
        split = None if tensor.tp_dim is None else (tensor.tp_dim, tensor.tp_blocks)
        if not is_share(shard.parts, tensor.shape, split, layout.tp, at.tp):
            yield f"{name} holds {shard.parts}: not the share of tp rank {at.tp} of {tensor}"
