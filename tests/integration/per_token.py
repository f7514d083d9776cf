"""GPTs on random tokens of which each sample counts another number. Loaded by workers."""

from __future__ import annotations

from typing import Any

from liver_hpc.layout.coordinates import Layout
from tests.integration.random_tokens import RandomTokenGPT


class MaskedGPT(RandomTokenGPT):
    """The mean over tokens of a micro-batch, and then over micro-batches, as Megatron has it."""

    counted = 1.0

    def fetch(self, samples: Any, **seat: Any) -> Any:
        import torch

        tokens, labels, masks = super().fetch(samples, **seat)
        masks = torch.zeros_like(masks)
        for row, sample in enumerate(samples):
            masks[row, : 1 + 5 * sample % masks.shape[1]] = 1.0
        return tokens, labels, masks

    def loss(self, model: Any, samples: Any) -> Any:
        output, mean_loss = super().loss(model, samples)
        tokens = samples[2].sum() * self.counted

        def telling(losses: Any) -> Any:
            mean, told = mean_loss(losses)
            return mean, told | {"tokens": tokens}

        return output, telling


class PerTokenGPT(MaskedGPT):
    """The mean over the tokens of the global batch."""

    def _transformer_config(self, layout: Layout) -> Any:
        config = super()._transformer_config(layout)
        config.calculate_per_token_loss = True
        return config


class SilentGPT(PerTokenGPT):
    """It does not tell how many tokens there are."""

    def loss(self, model: Any, samples: Any) -> Any:
        return RandomTokenGPT.loss(self, model, samples)


class HalfGPT(PerTokenGPT):
    """Its tokens count half: which no number of tokens is."""

    counted = 0.5
