"""Modules that stand on a CPU for libraries that only a GPU needs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DYNAMO = "torch._dynamo"


def put_identity_dynamo() -> None:
    """torch.compile as the identity: no dynamo, no C++ compilation for `jit_fuser` functions.

    Importing dynamo takes a seventh of a worker's boot and lists torch.cuda's functions. The first
    optimizer imports it only to ask whether anything is being compiled; some of torch's utilities
    do so for its settings, which are the real ones here.
    """
    torch_module: Any = torch
    torch_module.compile = _unchanged
    if DYNAMO in sys.modules:
        return
    dynamo: Any = types.ModuleType(DYNAMO, "Stands for dynamo: compiles nothing.")
    dynamo.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # where its submodules are
    dynamo.disable = dynamo.allow_in_graph = dynamo.assume_constant_result = _unchanged
    dynamo.graph_break = dynamo.reset = lambda *_args, **_kwargs: None
    dynamo.trace_rules = types.ModuleType(f"{DYNAMO}.trace_rules")
    dynamo.trace_rules.clear_lru_cache = lambda: None

    def submodule(name: str) -> types.ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{DYNAMO}.{name}")
        except ImportError as error:
            raise AttributeError(
                f"{DYNAMO}, for which nothing stands on a CPU, has no {name}: {error}"
            ) from error

    dynamo.__getattr__ = submodule
    sys.modules[DYNAMO] = torch_module._dynamo = dynamo
    sys.modules[dynamo.trace_rules.__name__] = dynamo.trace_rules


def _unchanged(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    """A decorator, with or without arguments, that decorates nothing."""
    return (lambda decorated: decorated) if function is None else function


class _Anything:
    """Stands for any object of an import-only module."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getitem__(self, _key: object) -> _Anything:
        return _Anything()

    def __or__(self, _other: object) -> _Anything:
        return _Anything()

    __ror__ = __or__


def _import_only_module(name: str) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []

    def missing(attribute: str) -> _Anything:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Anything()

    module.__getattr__ = missing
    return module  # type: ignore[no-any-return]


@contextlib.contextmanager
def import_only_triton() -> Iterator[None]:
    """Stands for triton, which megatron-core >= 0.17 imports always and never calls on a CPU.

    It is taken away afterwards: torch, and dynamo above all, must not believe that triton is here.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    put_identity_dynamo()
    triton: Any = _import_only_module("triton")
    triton.language = _import_only_module("triton.language")
    triton.__version__ = "0.0"
    triton.jit = lambda function=None, **_k: function if function is not None else (lambda f: f)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.heuristics = triton.autotune = lambda *_a, **_k: lambda function: function
    sys.modules["triton"] = triton
    sys.modules["triton.language"] = triton.language
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
            del sys.modules[name]
