"""Imported before megatron-core, which wants triton from 0.17 on: a CPU build of torch does not
bring that."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

_VERSION = tuple(map(int, importlib.metadata.version("megatron-core").split(".")[:2]))
if _VERSION >= (0, 17) and importlib.util.find_spec("triton") is None:
    from liver_hpc.world.cpu_shim import import_only_triton

    with import_only_triton():
        importlib.import_module("megatron.core.models.gpt.gpt_model")
