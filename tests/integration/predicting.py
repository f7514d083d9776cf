"""A GPT that predicts two further tokens beside the next one. Loaded by workers."""

from __future__ import annotations

from typing import Any

from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.base import BuildContext
from tests.integration.random_tokens import RandomTokenGPT

FURTHER = 2


class PredictingGPT(RandomTokenGPT):
    """Megatron's multi-token prediction, with its even split of a pipeline."""

    weight = 0.5

    def _transformer_config(self, layout: Layout) -> Any:
        config = super()._transformer_config(layout)
        config.mtp_num_layers, config.mtp_loss_scaling_factor = FURTHER, self.weight
        return config

    def _stages(self, layout: Layout) -> None:
        return None

    def build(self, context: BuildContext) -> Any:
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.models.gpt.gpt_model import GPTModel

        from liver_hpc.recipes.local_layers import LocalNorm

        options, config = self.options, self._transformer_config(context.layout)
        block = self._block(config, context)
        further = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, block, use_transformer_engine=False, vp_stage=context.vp_stage
        )
        for layer in further.layer_specs if further is not None else ():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = LocalNorm
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            mtp_block_spec=further,
            vocab_size=options.vocab_size,
            max_sequence_length=options.seq_length,
            pre_process=context.is_first_stage,
            post_process=context.is_last_stage,
            share_embeddings_and_output_weights=options.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=context.groups,
            vp_stage=context.vp_stage,
        )


class CarelessGPT(PredictingGPT):
    """What it predicts further counts nothing."""

    weight = 0.0
