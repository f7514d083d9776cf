"""The default recipe: megatron-core's GPT on Megatron's indexed token data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from liver_hpc.config.indexed_data import PARTS, checked_share, sequence_lengths
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.host.files import LOCK_LIMIT_S
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ramp import samples_before
from liver_hpc.layout.stages import stage_layers
from liver_hpc.layout.tensors import TensorSpec
from liver_hpc.recipes.base import BuildContext, LossFunction, Recipe, megatron_sizes
from liver_hpc.recipes.gpt_activations import rehearsal_bytes
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.gpt_costs import layer_costs
from liver_hpc.recipes.text_data import VOCABULARY, text_files

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule

    from liver_hpc.recipes.samples import TokenSamples


class GPT(Recipe):
    """`model:` is a GPTConfig. Samples are indices into Megatron's GPTDataset."""

    Options = GPTConfig
    options: GPTConfig

    def __init__(self, options: GPTConfig, config: RunConfig) -> None:
        super().__init__(options, config)
        self._check_data_keys()
        self._samples: TokenSamples | None = None

    def check_options_in(self, layout: Layout) -> None:
        options = self.options
        if options.groups % layout.tp:
            key = "heads" if options.query_groups is None else "query_groups"
            raise ConfigError(f"tp={layout.tp} does not divide model.{key}, {options.groups}")
        if layout.pp > options.layers:
            raise ConfigError(f"pp={layout.pp} is more than the model's {options.layers} layers")
        self._check_experts(layout)
        shares = layout.tp * layout.cp if layout.sequence_parallel else 1
        if self.options.seq_length % shares:
            raise ConfigError(
                f"model.seq_length {self.options.seq_length} is not a multiple of tp x cp = "
                f"{shares}, over which sequence parallelism shares it"
            )
        if layout.cp > 1 and self.options.seq_length % (2 * layout.cp):
            raise ConfigError(
                f"model.seq_length {self.options.seq_length} is not a multiple of 2 cp = "
                f"{2 * layout.cp}: each context-parallel rank has two chunks of a sample"
            )

    def _check_experts(self, layout: Layout) -> None:
        number = self.options.experts.number
        if layout.ep > 1 and not number:
            raise ConfigError(
                f"ep={layout.ep} wants model.experts.number: the model has no experts"
            )
        if number % layout.ep:
            raise ConfigError(f"ep={layout.ep} does not divide {number} experts")
        if number and layout.tp > 1 and not layout.sequence_parallel:
            raise ConfigError(f"{layout}: experts with tp want sequence parallelism: add sp")

    def hidden_shape(self) -> tuple[int, ...]:
        return (self.options.seq_length, self.config.train.micro_batch, self.options.hidden)

    def tokens(self) -> int:
        return self.options.seq_length

    def rehearsal_bytes(self, layout: Layout) -> int | None:
        micro_batch = self.config.train.micro_batch
        return rehearsal_bytes(self.options, layout, self._stage_layers(layout), micro_batch)

    def summary(self) -> Mapping[str, str]:
        return {"parameters": f"{self.spec.elements / 1e6:.2f} M"}

    # ---- data

    def _check_data_keys(self) -> None:
        data = self.config.data
        if data is None:
            raise ConfigError(
                "data: the GPT recipe wants data.prefix, data.blend or data.text, got nothing"
            )
        if self.config.eval is not None and not data.shares[1]:
            raise ConfigError(
                "eval: wants data.split with a share of validation, the second one, such as "
                f"969,30,1; got {data.split or 'none'}"
            )
        if data.text is not None and self.options.vocab_size < VOCABULARY:
            raise ConfigError(
                f"model.vocab_size: text is tokenized by bytes, which wants at least "
                f"{VOCABULARY}, got {self.options.vocab_size}"
            )

    def check_data(self) -> None:
        """Each share that is read has a sample, in each pair of files."""
        data = self.config.data
        assert data is not None
        if data.text is not None:
            documents = [file.take_bytes + 1 for file in text_files(data)]
            lengths = {"data.text": np.array(documents)}
        else:
            pairs = [data.prefix] if data.prefix else [each.prefix for each in data.blend or ()]
            lengths = {f"data: {prefix}": sequence_lengths(prefix) for prefix in pairs}
        parts = PARTS[:1] if self.config.eval is None else PARTS[:2]
        for (name, each), part in product(lengths.items(), parts):
            checked_share(name, each, data.split or "1", part, self.options.seq_length)

    def open(self, run_directory: Path) -> None:
        from liver_hpc.recipes.samples import Corpus, TokenSamples

        data, validation = self.config.data, self.config.eval
        assert data is not None
        if data.blend is None:
            assert data.prefix is not None, "text becomes a pair before a run begins"
            corpus = Corpus((data.prefix,), None, data.split or "1")
        else:
            prefixes = tuple(source.prefix for source in data.blend)
            weights = tuple(source.weight for source in data.blend)
            corpus = Corpus(prefixes, weights, data.split or "1")
        train = self.config.train
        # As many as Megatron makes: its order depends on how many there are.
        times = 0 if validation is None else train.steps // validation.every_steps + 1
        self._samples = TokenSamples(
            corpus=corpus,
            seq_length=self.options.seq_length,
            counts=(
                samples_before(train, train.steps),
                0 if validation is None else times * validation.steps * train.global_batch,
            ),
            seed=data.seed,
            cache=run_directory / "data-cache",
            limit_s=max(LOCK_LIMIT_S, self.config.limits.boot_s),
        )

    def batch(self, step: int) -> Sequence[Any]:
        return self.sample_numbers(step)

    def validation_batch(self, number: int) -> Sequence[Any]:
        """Its samples are numbered behind those of training."""
        size = self.config.train.global_batch
        first = samples_before(self.config.train, self.config.train.steps) + number * size
        return range(first, first + size)

    # ---- model

    def build(self, context: BuildContext) -> MegatronModule:
        from megatron.core.models.gpt.gpt_model import GPTModel

        options = self.options
        config = self._transformer_config(context.layout)
        return GPTModel(
            config=config,
            transformer_layer_spec=self._block(config, context),
            vocab_size=options.vocab_size,
            max_sequence_length=options.seq_length,
            pre_process=context.is_first_stage,
            post_process=context.is_last_stage,
            share_embeddings_and_output_weights=options.tied_embeddings,
            position_embedding_type="rope" if options.position == "rope" else "learned_absolute",
            rotary_base=options.rotary_base,
            pg_collection=context.groups,
            vp_stage=context.vp_stage,
        )

    def _block(self, config: Any, context: BuildContext) -> Any:
        """The layers of one chunk: of Transformer Engine where it is installed."""
        from megatron.core.models.gpt import gpt_layer_specs

        from liver_hpc.recipes.local_layers import local_block

        wanted = self.options.implementation
        if wanted == "te" and not gpt_layer_specs.HAVE_TE:
            raise ConfigError(
                "model.implementation: te wants Transformer Engine, which Megatron does not find "
                "here; local needs none"
            )
        if wanted == "local" or not gpt_layer_specs.HAVE_TE:
            return local_block(config, context)
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=True,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=context.vp_stage,
            pp_rank=context.at.pp,
        )

    def _transformer_config(self, layout: Layout) -> Any:
        import torch
        from megatron.core.transformer import TransformerConfig

        options = self.options
        dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
        gated = options.activation == "swiglu"
        norms = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
        return TransformerConfig(
            num_layers=options.layers,
            hidden_size=options.hidden,
            ffn_hidden_size=options.ffn_hidden,
            num_attention_heads=options.heads,
            num_query_groups=options.groups,
            kv_channels=options.head_width,
            gated_linear_unit=gated,
            activation_func=(torch.nn.functional.silu if gated else torch.nn.functional.gelu),
            add_bias_linear=options.bias,
            normalization=norms[options.normalization],
            qk_layernorm=options.qk_norm,
            hidden_dropout=options.dropout,
            attention_dropout=options.dropout,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=options.dtype == "bf16",
            **megatron_sizes(layout),
            deallocate_pipeline_outputs=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            pipeline_model_parallel_layout=self._stages(layout),
            **self._expert_options(),
            **options.recomputation,
        )

    def _expert_options(self) -> dict[str, Any]:
        """What Megatron's configuration says of experts."""
        experts = self.options.experts
        if not experts.number:
            return {}
        return {
            "num_moe_experts": experts.number,
            "moe_router_topk": experts.topk,
            # Of one score there is nothing to normalize after the choice.
            "moe_router_pre_softmax": experts.topk == 1,
            "moe_ffn_hidden_size": experts.ffn_hidden or self.options.ffn_hidden,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden,
            "moe_layer_freq": [*map(int, self.options.layers_with_experts)],
            "moe_router_score_function": experts.score_function,
            "moe_router_enable_expert_bias": experts.bias_update_rate > 0,
            "moe_router_bias_update_rate": experts.bias_update_rate,
            "moe_router_load_balancing_type": experts.load_balancing,
            "moe_aux_loss_coeff": experts.aux_loss_coeff,
            "moe_z_loss_coeff": experts.z_loss_coeff or None,
            "moe_token_dispatcher_type": experts.dispatcher,
            "moe_grouped_gemm": experts.grouped,
        }

    def _stages(self, layout: Layout) -> list[list[str]] | None:
        """The parts of the model that each stage has, such that the slowest one is least; None:
        Megatron's even split, which an interleaved pipeline has."""
        if layout.pp == 1 or layout.vpp > 1:
            return None
        first, *others = (["decoder"] * count for count in self._stage_layers(layout))
        return [["embedding", *first], *others[:-1], [*others[-1], "loss"]]

    def _stage_layers(self, layout: Layout) -> tuple[int, ...]:
        """How many layers each stage has."""
        if layout.vpp > 1:
            return (self.options.layers // layout.pp,) * layout.pp
        return stage_layers(layer_costs(self.options), layout.pp)

    def initial(self, tensor: TensorSpec, generator: torch.Generator) -> torch.Tensor:
        """Megatron's scheme: normal(0, init_std), the outputs of residual branches scaled down
        by sqrt(2 * layers), norms one, biases zero."""
        import torch

        if len(tensor.shape) == 1:
            # Transformer Engine's layers have norms within: layer_norm_weight.
            is_scale = tensor.name.endswith(("norm.weight", "norm_weight"))
            return (torch.ones if is_scale else torch.zeros)(tensor.shape)
        std = self.options.init_std
        if "linear_proj" in tensor.name or "linear_fc2" in tensor.name:
            std /= math.sqrt(2.0 * self.options.layers)
        return torch.empty(tensor.shape).normal_(0.0, std, generator=generator)

    # ---- one micro-batch

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        """(tokens, labels, masks), each [micro batch, seq_length]."""
        import torch

        if self._samples is None:
            raise ConfigError("the recipe's data is not open")
        read = zip(*(self._samples.sample(int(i)) for i in samples), strict=True)
        stacked = [torch.stack(parts) for parts in read]
        if (most := max(int(part.max()) for part in stacked[:2])) >= self.options.vocab_size:
            # Which with tp has an embedding of zeros, and as a label a logit of zero.
            raise ConfigError(
                f"the data has a token {most}, model.vocab_size is {self.options.vocab_size}: "
                "wanted more than the largest token"
            )
        return tuple(part.pin_memory() if torch.cuda.is_available() else part for part in stacked)

    def loss(self, model: MegatronModule, samples: Any) -> tuple[torch.Tensor, LossFunction]:
        import torch
        from megatron.core.utils import get_attr_wrapped_model

        from liver_hpc.recipes.local_attention import share_of_sequence

        device = next(model.parameters()).device
        tokens, labels, masks = (part.to(device, non_blocking=True) for part in samples)
        positions = torch.arange(tokens.shape[1], device=device).expand(len(tokens), -1)
        counted = masks.sum()  # of whole samples
        cp_group = get_attr_wrapped_model(model, "pg_collection").cp
        tokens, labels, masks, positions = share_of_sequence(
            cp_group, tokens, labels, masks, positions
        )
        output = model(tokens, positions, None, labels=labels)

        def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = (losses.float() * masks).sum() / counted
            return mean, {"loss": mean.detach().clone()}

        return output, mean_loss
