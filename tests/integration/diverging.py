"""A recipe whose loss is no number from a step on. Loaded by workers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.integration.random_tokens import RandomTokenGPT

FIRST_STEP = 3


class DivergingGPT(RandomTokenGPT):
    """RandomTokenGPT that comes to NaN, in loss and gradients, from FIRST_STEP on."""

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        return samples, super().fetch(samples, layout, at)

    def loss(self, model: Any, samples: Any) -> tuple[Any, Any]:
        samples, read = samples
        output, loss = super().loss(model, read)
        if int(samples[0]) < FIRST_STEP * self.config.train.global_batch:
            return output, loss
        return output * float("nan"), loss
