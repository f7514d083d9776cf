"""The `model` section of the GPT recipe, and its tensors. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from liver_hpc.config.schema import PositiveInt
from liver_hpc.layout.tensors import ModelSpec, TensorSpec


class GPTConfig(BaseModel):
    """A decoder-only transformer as megatron-core's GPTModel builds it; sizes in elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt = 4
    hidden: PositiveInt = 256
    ffn_hidden: PositiveInt = 512
    heads: PositiveInt = 4
    query_groups: PositiveInt | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    tied_embeddings: bool = True
    position: Literal["rope", "learned"] = "rope"
    seq_length: PositiveInt = 128
    vocab_size: PositiveInt = 512
    dtype: Literal["fp32", "bf16"] = "fp32"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: Annotated[float, Field(gt=0)] = 0.02
    first_stage_layers: PositiveInt | None = None
    last_stage_layers: PositiveInt | None = None

    @model_validator(mode="after")
    def _divisible(self) -> GPTConfig:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of query_groups {self.groups}")
        return self

    @property
    def groups(self) -> int:
        """Query groups: each shares one key and one value head."""
        return self.query_groups or self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def gpt_tensors(config: GPTConfig) -> ModelSpec:
    """The tensors in the order of GPTModel.parameters() (megatron-core's local layer spec)."""
    hidden = config.hidden
    tensors = [
        TensorSpec(
            "embedding.word_embeddings.weight",
            (config.vocab_size, hidden),
            "first",
            tp_dim=0,
            tied_last=config.tied_embeddings,
        )
    ]
    if config.position == "learned":
        shape = (config.seq_length, hidden)
        tensors.append(TensorSpec("embedding.position_embeddings.weight", shape, "first"))
    for layer in range(config.layers):
        tensors.extend(_layer_tensors(config, layer))
    tensors.extend(_norm(config, "decoder.final_layernorm", "last"))
    if not config.tied_embeddings:
        shape = (config.vocab_size, hidden)
        tensors.append(TensorSpec("output_layer.weight", shape, "last", tp_dim=0))
    return ModelSpec(
        tuple(tensors),
        config.layers,
        parameter_bytes=4 if config.dtype == "fp32" else 2,
        first_stage_layers=config.first_stage_layers,
        last_stage_layers=config.last_stage_layers,
    )


def _layer_tensors(config: GPTConfig, layer: int) -> list[TensorSpec]:
    prefix, hidden = f"decoder.layers.{layer}", config.hidden
    blocks = 2 if config.activation == "swiglu" else 1
    qkv_rows = (config.heads + 2 * config.groups) * config.head_dim

    def linear(name: str, shape: tuple[int, int], tp_dim: int, tp_blocks: int = 1) -> None:
        weight = f"{prefix}.{name}.weight"
        tensors.append(TensorSpec(weight, shape, layer, tp_dim=tp_dim, tp_blocks=tp_blocks))
        if config.bias:
            # A row-parallel layer adds its bias after the reduction: a copy on every tp rank.
            split = 0 if tp_dim == 0 else None
            bias = f"{prefix}.{name}.bias"
            tensors.append(
                TensorSpec(bias, shape[:1], layer, split, tp_blocks if split == 0 else 1)
            )

    tensors = _norm(config, f"{prefix}.input_layernorm", layer)
    linear("self_attention.linear_proj", (hidden, hidden), tp_dim=1)
    linear("self_attention.linear_qkv", (qkv_rows, hidden), tp_dim=0)
    tensors.extend(_norm(config, f"{prefix}.pre_mlp_layernorm", layer))
    linear("mlp.linear_fc1", (config.ffn_hidden * blocks, hidden), tp_dim=0, tp_blocks=blocks)
    linear("mlp.linear_fc2", (hidden, config.ffn_hidden), tp_dim=1)
    return tensors


def _norm(config: GPTConfig, name: str, stage: int | Literal["last"]) -> list[TensorSpec]:
    parts = ["weight"] if config.normalization == "rmsnorm" else ["weight", "bias"]
    return [TensorSpec(f"{name}.{part}", (config.hidden,), stage) for part in parts]
