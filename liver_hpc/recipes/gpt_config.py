"""The `model` section of the GPT recipe. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from liver_hpc.config.schema import PositiveInt, Seconds


class LayerTimes(BaseModel):
    """Seconds that a micro-batch takes in the parts of the model, forward and backward, on one
    worker; `liver check-model --times` measures them.

    layer: of every layer, or a list with one value for each. output: with the loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedding: Seconds
    layer: Seconds | tuple[Seconds, ...]
    output: Seconds


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
    layer_times: LayerTimes | None = None

    @model_validator(mode="after")
    def _divisible(self) -> GPTConfig:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of query_groups {self.groups}")
        each = self.layer_times.layer if self.layer_times is not None else None
        if isinstance(each, tuple) and len(each) != self.layers:
            raise ValueError(f"layer_times.layer has {len(each)} values for {self.layers} layers")
        return self

    @property
    def groups(self) -> int:
        """Query groups: each shares one key and one value head."""
        return self.query_groups or self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
