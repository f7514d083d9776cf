"""Reads what others have pickled, without running what they say.

Of a checkpoint's pickles nothing is made but plain values, tensors, and the records of
torch.distributed.checkpoint; of every other class an empty stand-in, so that arguments of a release
that is not installed here can be read, too.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import io
import pickle
import types
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from liver_hpc.checkpoint.index import read_twice
from liver_hpc.errors import CheckpointError

DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a file raises that is not what was written."""

_PLAIN = {"set", "frozenset", "complex", "bytearray", "slice", "range"}
_RECORDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
_KNOWN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **{
        ("torch._utils", name): vars(torch._utils)[name]
        for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")  # the later one of fp8
    },
    ("torch.serialization", "_get_layout"): vars(torch.serialization)["_get_layout"],
    **{("builtins", name): getattr(builtins, name) for name in _PLAIN},
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (*_RECORDS, "TensorProperties", "MetadataIndex", "StorageMeta")
    },
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): vars(metadata)["_MEM_FORMAT_ENCODING"],
    (filesystem.__name__, "_StorageInfo"): vars(filesystem)["_StorageInfo"],
}


class StandIn:
    """An object of a class that is not made here."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def __setstate__(self, _state: Any) -> None: ...

    def __setitem__(self, _key: Any, _value: Any) -> None: ...

    def append(self, _value: Any) -> None: ...

    def extend(self, _values: Any) -> None: ...


@cache
def _stand_in(module: str, name: str) -> type:
    return type(name.rpartition(".")[2], (StandIn,), {"__module__": module})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if known := _KNOWN.get((module, name)):
            return known
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        return _stand_in(module, name)


_pickle_module = types.SimpleNamespace(
    __name__=__name__, Unpickler=_Unpickler, load=lambda stream, **_: _Unpickler(stream).load()
)


def unpickled(path: Path) -> Any:
    """A pickle; raises CheckpointError, naming the file."""
    try:
        return _Unpickler(io.BytesIO(read_twice(path.read_bytes))).load()
    except DAMAGE as error:
        raise unreadable(path, error) from error


def torch_loaded(stream: IO[bytes]) -> Any:
    """What torch.save has written, on the CPU; raises DAMAGE.

    In a TorchScript archive, which is code, torch would look by other means than our unpickler.
    """
    start, torchs = stream.tell(), vars(torch.serialization)
    if torchs["_is_zipfile"](stream):
        with torchs["_open_zipfile_reader"](stream) as reader:
            if torchs["_is_torchscript_zip"](reader):
                raise pickle.UnpicklingError("it is a TorchScript archive")
    stream.seek(start)
    return torch.load(stream, "cpu", _pickle_module, weights_only=False)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{path} cannot be read: {said}")
