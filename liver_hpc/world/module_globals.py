"""What Megatron keeps in globals of its modules, once for each world.

A module that `answer_per_world` was told of answers for the world of the calling thread: each of
its functions runs over that world's copy of the module's globals. The function objects stay, and
only their code changes, so whoever has imported one by name is answered for the right world, too.
On a thread without a world the module is as it was.

`tests/integration/test_module_globals.py` holds what this leans on against the installed release.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from liver_hpc.errors import LiverError
from liver_hpc.world import thread

Namespace = dict[str, Any]
"""One world's copy of a module's globals."""

_ATTRIBUTE = "globals_of_modules"
"""Of a world's groups: its namespaces, by module."""
_LOOK_UP = "__function_of_thread__"

_plain: dict[str, dict[str, types.FunctionType]] = {}
"""By module and name: the functions as they were."""


def answer_per_world(module: types.ModuleType) -> None:
    """Makes a module's functions answer for the world of the calling thread; once a process.

    Raises LiverError for a function that cannot be made to, as a decorator holds it in a closure.
    """
    if module.__name__ in _plain:
        return
    functions = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    }
    closed = [name for name, function in functions.items() if function.__closure__]
    if closed:
        raise LiverError(
            f"{module.__name__} of this release cannot answer for several worlds: "
            f"{', '.join(closed)} is decorated"
        )
    plain = {name: _over(vars(module), function) for name, function in functions.items()}

    def function_of_thread(name: str) -> Any:
        groups = thread.here.groups
        if groups is None:
            return plain[name]
        return namespace_of(groups, module)[name]

    setattr(module, _LOOK_UP, function_of_thread)
    for name, function in functions.items():
        signature = inspect.signature(function)
        function.__code__ = _code_that_asks(name)
        function.__defaults__ = function.__kwdefaults__ = None
        function.__signature__ = signature  # type: ignore[attr-defined]
    _plain[module.__name__] = plain


def namespace_of(groups: Any, module: types.ModuleType) -> Namespace:
    """A module's globals as the world of `groups` has them. Raises as `answer_per_world`, which it
    calls."""
    answer_per_world(module)
    worlds: dict[str, Namespace] = vars(groups).setdefault(_ATTRIBUTE, {})
    found = worlds.get(module.__name__)
    if found is None:
        found = dict(vars(module))
        for name, function in _plain[module.__name__].items():
            found[name] = _over(found, function)
        worlds[module.__name__] = found
    return found


def forget(groups: Any) -> None:
    """Drops a world's namespaces."""
    vars(groups).pop(_ATTRIBUTE, None)


def _over(namespace: Namespace, function: types.FunctionType) -> types.FunctionType:
    """The same function over other globals."""
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _code_that_asks(name: str) -> types.CodeType:
    """The code of a function that calls what the look-up of its module finds under a name."""
    scope: Namespace = {}
    text = f"def {name}(*args, **kwargs):\n    return {_LOOK_UP}({name!r})(*args, **kwargs)\n"
    exec(text, scope)
    code: types.CodeType = scope[name].__code__
    return code


class Instead:
    """An object in which some attributes are others."""

    def __init__(self, plain: Any, **others: Any) -> None:
        self._plain = plain
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)
