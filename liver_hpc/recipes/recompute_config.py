"""What of a model is computed again in the backward. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from liver_hpc.config.schema import PositiveInt, Section


class RecomputeConfig(Section):
    """What is computed again in the backward instead of being kept, as Megatron has it.

    selective: the `recompute_modules` of each layer. full: whole layers; uniform: all, as many at
    a time as `recompute_num_layers` says; block: only so many of each chunk, one by one.
    """

    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: list[
        Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts", "moe_act"]
    ] = Field(default=["core_attn"])
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
