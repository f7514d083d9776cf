"""Layers without Transformer Engine for any layout; for recipes of one's own too.

config = TransformerConfig(...)
GPTModel(config, local_block(config, context), ...)
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm

from liver_hpc.recipes.base import BuildContext
from liver_hpc.recipes.local_attention import LocalAttention

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class LocalNorm:
    """torch's norm of the kind that the configuration names, with or without sequence parallelism.

    Megatron's own refuses that. Each tp rank then norms its share of the sequence, so gradients of
    weight and bias are to be summed over tp ranks: the mark `sequence_parallel` says so.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        if config.normalization not in _NORMS or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"LocalNorm: no {config.normalization} with layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma}; it has {' and '.join(_NORMS)}"
            )
        norm = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def local_block(config: Any, context: BuildContext) -> Any:
    """The layers of one chunk, dense ones and those with experts, as `config.moe_layer_freq` says;
    Megatron's TransformerBlockSubmodules. The model is to be given no attention mask."""
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=context.vp_stage,
        pp_rank=context.at.pp,
    )
    block.layer_norm = LocalNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        attention = parts.self_attention.submodules
        attention.core_attention = LocalAttention
        for owner, names in (
            (parts, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm", "kv_layernorm")),
        ):
            for name in names:
                if getattr(owner, name, IdentityOp) not in (IdentityOp, L2Norm):
                    setattr(owner, name, LocalNorm)
    return block
