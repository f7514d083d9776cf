"""A model of one's own: of its parameters some are frozen, and its layers have buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from liver_hpc.recipes.base import BuildContext
from liver_hpc.recipes.gpt import GPT

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule


class Adapted(GPT):
    """The GPT recipe with frozen embeddings, of every second layer a frozen projection, and in
    each layer a gain of its own by which its output is multiplied, and its number."""

    def build(self, context: BuildContext) -> MegatronModule:
        import torch

        model = super().build(context)
        if context.is_first_stage:
            model.embedding.word_embeddings.weight.requires_grad_(False)
        for layer in model.decoder.layers:
            number = layer.layer_number
            gain = 1 + 0.05 * torch.sin(torch.arange(self.options.hidden) + number)
            layer.register_buffer("gain", gain)
            layer.register_buffer("number", torch.tensor([number]))
            layer.register_forward_hook(_gained)
            if number % 2:
                layer.self_attention.linear_proj.weight.requires_grad_(False)
        return model


def _gained(layer: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[Any, ...]:
    hidden, *others = outputs  # [sequence, micro batch, hidden]
    return (hidden * layer.gain, *others)
