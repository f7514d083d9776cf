"""A GPT with state of every kind: frozen parameters, split over tp and tied, and persistent buffers
that each forward changes, in place or by another tensor. Loaded by workers."""

from __future__ import annotations

from typing import Any

from liver_hpc.recipes.base import BuildContext
from tests.integration.faulty import FaultyGPT

FROZEN = ("embedding.word_embeddings.weight", "output_layer.weight", "linear_proj.weight")
LAYERS = 4


class KeepingGPT(FaultyGPT):
    """All changed buffers of a layer are functions of how often it went forward."""

    def build(self, context: BuildContext) -> Any:
        import torch

        model = super().build(context)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(FROZEN))
        for layer in model.decoder.layers:
            layer.register_buffer("calls", torch.tensor(0))
            layer.register_buffer("parity", torch.zeros(7, dtype=torch.bool))
            layer.register_buffer("expert_bias", torch.zeros(3))  # fp32 in a bf16 model, too
            layer.register_buffer("average", torch.zeros(2, 3, 4))
            layer.register_buffer("scratch", torch.zeros(2), persistent=False)
            layer.register_forward_pre_hook(_count)
        return model


def _count(layer: Any, _inputs: Any) -> None:
    calls = int(layer.calls) + 1
    layer.calls = layer.calls + 1
    layer.parity = layer.parity.logical_not()
    layer.expert_bias = layer.expert_bias + 0.125
    layer.average.fill_(calls % 100)
    layer.scratch += 1


def counted(calls: int) -> dict[str, list[float]]:
    """The distinct values in each of a layer's changed buffers after so many forwards."""
    return {
        "calls": [calls],
        "parity": [float(calls % 2)],
        "expert_bias": [calls * 0.125],
        "average": [calls % 100],
    }
