"""The `model` section of the GPT recipe. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from liver_hpc.config.schema import PositiveInt


class RecomputeOptions(BaseModel):
    """What is computed again in the backward instead of being kept, as Megatron has it.

    selective: the `recompute_modules` of each layer. full: whole layers; uniform: all, as many at
    a time as `recompute_num_layers` says; block: only so many of each chunk, one by one.
    """

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[
        Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts", "moe_act"]
    ] = ["core_attn"]
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1

    @property
    def recomputation(self) -> dict[str, Any]:
        """Keywords of Megatron's TransformerConfig."""
        if self.recompute == "none":
            return {}
        if self.recompute == "selective":
            return {
                "recompute_granularity": "selective",
                "recompute_modules": self.recompute_modules,
            }
        return {
            "recompute_granularity": "full",
            "recompute_method": self.recompute_method,
            "recompute_num_layers": self.recompute_num_layers,
        }


class GPTConfig(RecomputeOptions):
    """A decoder-only transformer as megatron-core's GPTModel builds it; sizes in elements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Literal["auto", "local", "te"] = "auto"

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
