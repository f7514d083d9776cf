"""A recipe whose second worker changes a norm's weight by itself, once. Loaded by workers only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.integration.random_tokens import RandomTokenGPT

AT_STEP = 8


class DriftingGPT(RandomTokenGPT):
    """RandomTokenGPT one copy of whose weights drifts away from the others at AT_STEP."""

    _drifted = False

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        return samples, super().fetch(samples, layout, at)

    def loss(self, model: Any, samples: Any) -> tuple[Any, Any]:
        import torch

        samples, read = samples
        late = int(samples[0]) >= AT_STEP * self.config.train.global_batch
        if late and os.environ["LIVER_LOCAL_RANK"] == "1" and not self._drifted:
            self._drifted = True
            with torch.no_grad():
                norms = (p for name, p in model.named_parameters() if "norm" in name)
                next(norms)[0] += 1.0
        return super().loss(model, read)
