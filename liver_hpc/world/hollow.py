"""A world's memory, kind by kind: a world that is built beside another one has none at first.

Parameters lie in Megatron's buffers, gradients likewise, optimizer state in a tensor a shard. All
of them are views of storages, which give their memory back and get it again without anybody who
refers to them being told (`UntypedStorage.resize_`). While a hollow world is built nothing is
written to what it allocates, so that on a CPU no page of it ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import PARAMETER

if TYPE_CHECKING:
    from liver_hpc.world.world import World

_aten = torch.ops.aten
_EMPTY = {
    _aten.zeros.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.clone.default: _aten.empty_like.default,
    _aten._to_copy.default: _aten.empty_like.default,
}
"""What stands for an operation that makes a tensor: the same one without values."""
_WRITES = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}


class _Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Floating-point tensors of more than one element get no values."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation in _WRITES and _is_state(args[0]):
            return args[0]
        stand_in = _EMPTY.get(operation)
        if stand_in is not None and (
            _is_state(args[0]) if isinstance(args[0], torch.Tensor) else _is_floating(kwargs)
        ):
            kwargs.pop("non_blocking", None)
            return stand_in(*args, **kwargs)
        return operation(*args, **kwargs)


def _is_state(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 1


def _is_floating(kwargs: dict[str, Any]) -> bool:
    return (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point


@contextmanager
def untouched() -> Iterator[None]:
    """What is allocated on this thread is not written to; for buffers of parameters and gradients,
    and optimizer state, whose values come later."""
    with _Untouched():  # type: ignore[no-untyped-call]
        yield


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
