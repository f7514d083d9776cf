"""Memory that is allocated and not written to: on a CPU no page of it ever exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
