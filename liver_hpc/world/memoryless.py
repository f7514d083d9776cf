"""Tensors that have a device, a shape and a storage, and no memory: of a world that is built beside
one which fills the device. `hollow.allocate` gives them memory later (`UntypedStorage.resize_`).

torch makes no views of a storage that is too small for them, but for `_reinterpret_tensor`, by
which compiled code makes its own. What such tensors are in an operation, it is told on the meta
device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from liver_hpc.errors import PlanError
from liver_hpc.world.untouched import OneThreadsMode

_aten = torch.ops.aten
_MAKES = {_aten.empty.memory_format, _aten.zeros.default}
_ALIKE = {
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.empty_like.default, _aten.new_zeros.default, _aten.new_ones.default),
    *(_aten.new_full.default, _aten.new_empty.default),
}
"""Operations to which it is nothing what a tensor holds: they make one of its kind."""


class Memoryless(OneThreadsMode):  # type: ignore[no-untyped-call]
    """On its thread, floating-point tensors of more than one element that are made by their size
    have no memory, nor has what is computed of such ones; what is written to them is lost. makes:
    False where those made by their size, or like another one, are as ever.

    Raises PlanError for what would be written from one to memory that there is.
    """

    def __init__(self, makes: bool = True) -> None:
        super().__init__()
        self._makes = makes

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation.namespace == "c10d":  # of groups with stand-in backends
            return operation(*args, **kwargs)
        if not tree_any(has_none, (args, kwargs)):
            if not (self._makes and operation in _MAKES):
                return operation(*args, **kwargs)
            made = operation(*args, **{**kwargs, "device": "meta"})
            if not made.is_floating_point() or made.numel() <= 1:
                return operation(*args, **kwargs)
            return _without_memory(made, torch.empty(0, device=kwargs.get("device")).device)
        first = args[0]
        if operation._schema.is_mutable:
            if all(map(has_none, tree_leaves(first))):
                return first if operation._schema.returns else None
            raise PlanError(f"{operation} writes what has no memory yet to what has some")
        device = kwargs.get("device") or next(filter(has_none, tree_leaves((args, kwargs)))).device
        if not self._makes and operation in _ALIKE:
            return operation(_on_meta(first), *args[1:], **{**kwargs, "device": device})
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        made = operation(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))

        def there(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            if not operation.is_view:
                return _without_memory(one, device)
            return _reinterpreted(first, one, one.storage_offset() - first.storage_offset())

        return tree_map(there, made)


def has_none(value: Any) -> bool:
    """Whether it is a tensor without memory, though not without elements."""
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
        return False
    return value.untyped_storage().nbytes() == 0


@contextlib.contextmanager
def parameters() -> Iterator[None]:
    """While it lasts, the parameters of modules that this thread makes give their memory up as
    their module gets them; all else is made as ever. Nothing may look into them."""
    thread = threading.get_ident()

    def give_up(_module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None and threading.get_ident() == thread and not has_none(parameter):
            data = parameter.data
            parameter.data = _without_memory(data, data.device)

    hook = register_module_parameter_registration_hook(give_up)
    try:
        with Memoryless(makes=False):
            yield
    finally:
        hook.remove()


def _without_memory(like: torch.Tensor, device: Any) -> torch.Tensor:
    return _reinterpreted(torch.empty(0, dtype=like.dtype, device=device), like, 0)


def _reinterpreted(base: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """In the storage of `base`, so many elements behind its first one."""
    made: torch.Tensor = torch.ops.inductor._reinterpret_tensor(
        base, like.shape, like.stride(), offset
    )
    return made


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride, offset = value.shape, value.stride(), value.storage_offset()
    reach = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    whole = torch.empty(max(reach, 0), dtype=value.dtype, device="meta")
    return whole.as_strided(shape, stride, offset)
