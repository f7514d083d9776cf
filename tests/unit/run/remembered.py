"""All that a run remembers, as a value to compare with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import cache
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from pydantic import BaseModel

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.run.lifecycle import EventClock

IMMUTABLE = (str, int, float, bool, bytes, type(None), Enum, BaseModel, frozenset, type)
CACHES = {"_choices", "_weights"}
"""What `LayoutPolicy` has found out from the rest of what it remembers."""
NOT_STATE = (EventClock, BuiltinMethodType, FunctionType, MethodType, RunConfig)
Freeze = Callable[[Any, dict[int, int]], Any]


def remembered(value: Any) -> Any:
    """A value for `==` that holds all that may change within an object, however deep."""
    return _frozen(value, {})


def _frozen(value: Any, seen: dict[int, int]) -> Any:
    freeze = _freeze_of(type(value))
    if freeze is None:
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    return freeze(value, seen)


@cache
def _freeze_of(kind: type) -> Freeze | None:
    """How objects of a class are frozen; None for those that never change."""
    if issubclass(kind, NOT_STATE):
        return lambda value, seen: None
    parameters = getattr(kind, "__dataclass_params__", None)
    if issubclass(kind, IMMUTABLE) or (parameters is not None and parameters.frozen):
        return None
    if issubclass(kind, dict):
        return lambda value, seen: (
            tuple((k, _frozen(v, seen)) for k, v in value.items()),
            _frozen(getattr(value, "__dict__", None), seen),
        )
    if issubclass(kind, list | tuple | deque):
        return lambda value, seen: tuple([_frozen(inner, seen) for inner in value])
    if issubclass(kind, set):
        return lambda value, seen: frozenset(value)
    return _freeze_attributes if hasattr(kind, "__dict__") else None


def _freeze_attributes(value: Any, seen: dict[int, int]) -> Any:
    caches = CACHES if isinstance(value, LayoutPolicy) else ()
    state = {k: v for k, v in vars(value).items() if k not in caches}
    return (type(value), tuple([(k, _frozen(v, seen)) for k, v in state.items()]))
