"""The `model` section of the GPT recipe. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from liver_hpc.config.schema import NonNegativeInt, PositiveInt, Seconds, Section
from liver_hpc.recipes.presets import PRESETS

Coefficient = Annotated[float, Field(ge=0)]


class LayerTimes(Section):
    """Seconds that a micro-batch takes in the parts of the model, forward and backward, on one
    worker; `liver check-model --times` measures them."""

    embedding: Seconds
    layer: Seconds | tuple[Seconds, ...]
    output: Seconds


class ExpertsConfig(Section):
    """Layers in which a router sends each token to some of many feed-forward blocks; sizes in
    elements. Without a number, no layer is one."""

    number: NonNegativeInt = 0
    topk: PositiveInt = 2
    ffn_hidden: PositiveInt | None = None
    shared_ffn_hidden: PositiveInt | None = None
    layer_freq: PositiveInt | tuple[Literal[0, 1], ...] = 1
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    bias_update_rate: Coefficient = 0.0
    load_balancing: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    aux_loss_coeff: Coefficient = 0.0
    z_loss_coeff: Coefficient = 0.0
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    grouped: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ExpertsConfig:
        if not self.number:
            given = ", ".join(self.model_dump(exclude_defaults=True))
            if given:
                raise ValueError(f"number is 0, so that no layer has experts, but {given} is given")
            return self
        if self.topk > self.number:
            raise ValueError(f"topk {self.topk} is more than the number of experts, {self.number}")
        if self.bias_update_rate and self.score_function != "sigmoid":
            raise ValueError(
                "bias_update_rate wants score_function sigmoid, to whose scores the bias is added"
            )
        if (self.load_balancing == "none") != (self.aux_loss_coeff == 0):
            raise ValueError(
                f"load_balancing {self.load_balancing} with aux_loss_coeff {self.aux_loss_coeff}: "
                "a loss wants a coefficient, and a coefficient a loss"
            )
        return self


class GPTConfig(Section):
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
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[
        Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts", "moe_act"]
    ] = Field(default=["core_attn"])
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1
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
            each = self.experts.layer_freq
            if isinstance(each, tuple) and len(each) != self.layers:
                raise ValueError(
                    f"experts.layer_freq names {len(each)} layers, the model has {self.layers}"
                )
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
        each = self.experts.layer_freq
        if not self.experts.number:
            return (False,) * self.layers
        if isinstance(each, int):
            return tuple(number % each == 0 for number in range(self.layers))
        return tuple(map(bool, each))

    @property
    def groups(self) -> int:
        """Query groups: each shares one key and one value head."""
        return self.query_groups or self.heads

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden // self.heads

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
