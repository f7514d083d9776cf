"""On a process's path: Transformer Engine's own Python code, on a CPU.

Its modules are loaded as they are but for what asks for a GPU; its compiled half is
transformer_engine_torch.py beside this file. The fixture `engine` puts this folder, and the
package, on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

ENGINE = "transformer_engine"
ON_A_CPU = {
    b"torch.cuda.is_available()": b"True",
    b"torch.cuda.is_current_stream_capturing()": b"False",
    b'torch.device("cuda", torch.cuda.current_device())': b'torch.device("cpu")',
    b".is_cuda": b".is_floating_point()",
}
"""What its sources say, and what stands for that here."""
WORKSPACE_BYTES = 64


def _workspace(_device: Any, _overlaps: bool, grouped: bool) -> Any:
    import torch

    one = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
    return [one] if grouped else one


def _load_compiled_half(_framework: str) -> None:
    __import__("transformer_engine_torch")


def _anything(name: str) -> None:
    """For a module of which names alone are wanted."""
    if name.startswith("__"):
        raise AttributeError(name)


def _within(name: str) -> str:
    """A module's name in the package."""
    return name.partition(".")[2]


REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    "common": {"load_framework_extension": _load_compiled_half},
    "pytorch.utils": {
        "get_device_compute_capability": lambda: (9, 0),
        "get_sm_count": lambda: 1,
    },
    "pytorch.cpp_extensions.gemm": {"get_cublas_workspace": _workspace},
}
"""Module -> what it has in the place of its own."""
EMPTY = ("pytorch.onnx_extensions", "common.triton", "pytorch.triton")
"""Modules, with what is in them, whose code wants what is not installed, and is not called."""


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = b"" if _within(fullname).startswith(EMPTY) else self.get_data(path)
        for said, here in ON_A_CPU.items():
            source = source.replace(said, here)
        return self.source_to_code(source, path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        name = _within(module.__name__)
        module.__dict__.update(REPLACED.get(name, {}))
        if name.startswith(EMPTY):
            module.__dict__["__getattr__"] = _anything


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != ENGINE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else it looks for its libraries as it is imported
sys.meta_path.insert(0, _Finder)
