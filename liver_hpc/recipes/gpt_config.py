"""The `model` section of the GPT recipe. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from liver_hpc.config.schema import PositiveInt, Seconds, Section
from liver_hpc.recipes.expert_config import ExpertsConfig
from liver_hpc.recipes.presets import PRESETS
from liver_hpc.recipes.recompute_config import RecomputeConfig


class LayerTimes(Section):
    """Seconds that a micro-batch takes in the parts of the model, forward and backward, on one
    worker; `liver check-model --times` measures them.

    layer: of every layer, or a list with one value for each. output: with the loss.
    """

    embedding: Seconds
    layer: Seconds | tuple[Seconds, ...]
    output: Seconds


class GPTConfig(RecomputeConfig):
    """A decoder-only transformer as megatron-core's GPTModel builds it; sizes in elements.

    preset: a known architecture (presets.py), whose values are taken where no others are given.
    """

    preset: str | None = None
    implementation: Literal["auto", "local", "te"] = "auto"
    layers: PositiveInt = 4
    hidden: PositiveInt = 256
    ffn_hidden: PositiveInt = 512
    heads: PositiveInt = 4
    query_groups: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = True
    position: Literal["rope", "learned"] = "rope"
    rotary_base: PositiveInt = 10_000
    seq_length: PositiveInt = 128
    vocab_size: PositiveInt = 512
    dtype: Literal["fp32", "bf16"] = "fp32"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: Annotated[float, Field(gt=0)] = 0.02
    layer_times: LayerTimes | None = None
    experts: ExpertsConfig = ExpertsConfig()

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = PRESETS.get(str(given.get("preset")), {})
        sections = {
            key: value | given[key]
            for key, value in preset.items()
            if isinstance(value, dict) and isinstance(given.get(key), dict)
        }
        return preset | given | sections

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"wanted one of {', '.join(sorted(PRESETS))}; got {name!r}")
        return name

    @model_validator(mode="after")
    def _divisible(self) -> GPTConfig:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of query_groups {self.groups}")
        each = self.layer_times.layer if self.layer_times is not None else None
        if isinstance(each, tuple) and len(each) != self.layers:
            raise ValueError(f"layer_times.layer has {len(each)} values for {self.layers} layers")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> GPTConfig:
        if self.experts.number:
            self.experts.in_layers(self.layers)
            if self.bias:
                raise ValueError("bias: Megatron splits no biases of experts over tp")
            if self.experts.grouped and self.implementation != "te":
                raise ValueError(
                    f"experts.grouped wants implementation te, got {self.implementation}: "
                    "Transformer Engine computes all experts of a worker at once"
                )
        return self

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Of each layer, whether it has experts."""
        return (
            self.experts.in_layers(self.layers) if self.experts.number else (False,) * self.layers
        )

    @property
    def groups(self) -> int:
        """Query groups: each shares one key and one value head."""
        return self.query_groups or self.heads

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden // self.heads
