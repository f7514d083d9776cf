"""Stand-ins for what Megatron-LM has in Transformer Engine alone: norms that know of sequence
parallelism, attention that knows of context parallelism. With them `--transformer-impl local`
trains in any layout where there is no CUDA.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch


@cache
def install() -> None:
    """Puts them where megatron-core's local layers look; idempotent.

    After `cpu_shim.install()` and before a model is built. With a CUDA device it does nothing:
    there the script's own arguments choose.
    """
    if torch.version.cuda is not None:
        return
    from liver_hpc.recipes.local_attention import LocalAttention
    from liver_hpc.recipes.local_layers import LocalNorm

    class CausalAttention(LocalAttention):
        """LocalAttention for models that are given a mask: Transformer Engine too takes no notice
        of one where attention is causal."""

        def forward(  # type: ignore[override]
            self, query: Any, key: Any, value: Any, _mask: Any = None, *args: Any, **options: Any
        ) -> torch.Tensor:
            return super().forward(query, key, value, None, *args, **options)

    backends = importlib.import_module("megatron.core.models.backends")
    backends.LocalSpecProvider.layer_norm = lambda *_args, **_options: LocalNorm
    backends.LocalSpecProvider.core_attention = lambda *_args: CausalAttention
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    specs.LNImpl = specs.WrappedTorchNorm = LocalNorm
    block: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = LocalNorm  # the last one, of a model whose layers are all alike
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(routers).setdefault("te_general_gemm", None)  # asked for where it is not imported, too
