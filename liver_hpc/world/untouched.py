"""Memory that is allocated and not written to: on a CPU no page of it ever exists, or it is that of
a world that was let go, whose pages are there already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_EMPTY = {
    _aten.zeros.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.clone.default: _aten.empty_like.default,
    _aten._to_copy.default: _aten.empty_like.default,
}
"""What stands for an operation that makes a tensor: the same one without values."""
_WRITES = {_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar}
_MAKES = {_aten.empty.memory_format, _aten.empty_like.default}


class Kept:
    """Memory that tensors of the same size and type may have instead of new one, each once. On a
    CPU: what is new comes page by page, which takes longer than to fill it."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.UntypedStorage]] = defaultdict(list)
        by_address = {each.untyped_storage().data_ptr(): each for each in tensors}
        for tensor in by_address.values():
            storage = tensor.untyped_storage()
            self._free[tensor.dtype, storage.nbytes()].append(storage)

    def instead_of(self, made: torch.Tensor) -> torch.Tensor:
        """A tensor that has just been made, in memory that was kept where there is some."""
        storages = self._free[made.dtype, made.untyped_storage().nbytes()]
        if not storages:
            return made
        there = made.new_empty(0)
        return there.set_(storages.pop(), 0, made.shape, made.stride())


class OneThreadsMode(TorchDispatchMode):
    """A mode of torch's that concerns its thread alone: others may compile meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """By this torch knows."""
        return True


class Untouched(OneThreadsMode):  # type: ignore[no-untyped-call]
    """On its thread, floating-point tensors of more than one element get no values: for buffers of
    parameters and gradients, and optimizer state, whose values come later. kept: has memory for
    them."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

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
            operation = stand_in
        made = operation(*args, **kwargs)
        return self._kept.instead_of(made) if operation in _MAKES and _is_state(made) else made


def _is_state(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 1


def _is_floating(kwargs: dict[str, Any]) -> bool:
    return (kwargs.get("dtype") or torch.get_default_dtype()).is_floating_point
