"""The `model.experts` section of the GPT recipe. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from liver_hpc.config.schema import NonNegativeInt, PositiveInt, Section

Coefficient = Annotated[float, Field(ge=0)]


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

    def in_layers(self, layers: int) -> tuple[bool, ...]:
        """Which of the model's layers have experts, where `number` is not 0. Raises ValueError for
        a list that does not name each layer."""
        if isinstance(self.layer_freq, int):
            return tuple(number % self.layer_freq == 0 for number in range(layers))
        if len(self.layer_freq) != layers:
            raise ValueError(
                f"experts.layer_freq names {len(self.layer_freq)} layers, the model has {layers}"
            )
        return tuple(map(bool, self.layer_freq))
