"""A GPT with multi-latent attention, of Transformer Engine's layers. Loaded by workers."""

from __future__ import annotations

from typing import Any

from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.base import megatron_sizes
from tests.integration.random_tokens import RandomTokenGPT


class LatentGPT(RandomTokenGPT):
    def _transformer_config(self, layout: Layout) -> Any:
        import torch
        from megatron.core.transformer import MLATransformerConfig

        options = self.options
        return MLATransformerConfig(
            num_layers=options.layers,
            hidden_size=options.hidden,
            ffn_hidden_size=options.ffn_hidden,
            num_attention_heads=options.heads,
            multi_latent_attention=True,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_head_dim=16,
            qk_pos_emb_head_dim=8,
            v_head_dim=16,
            rope_type="rope",
            add_bias_linear=False,
            normalization="RMSNorm",
            qk_layernorm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pipeline_dtype=torch.float32,
            **megatron_sizes(layout),
            use_cpu_initialization=True,
            perform_initialization=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )
