"""A GPT on random tokens that tells metrics beside its loss. Loaded by workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.integration.random_tokens import RandomTokenGPT


class TellingGPT(RandomTokenGPT):
    """numbers: the mean number of a sample, a mean. squares: of their squares, as a sum and a
    count. rare: of micro-batches with the first sample of a batch alone."""

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        return samples, super().fetch(samples, layout, at)

    def loss(self, model: Any, samples: Any) -> Any:
        import torch

        samples, read = samples
        output, mean_loss = super().loss(model, read)
        # Each context-parallel rank has its share of a mean, and of a sum and its count.
        shares = model.module.pg_collection.cp.size()
        numbers = torch.tensor([float(each) for each in samples])

        def telling(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean, told = mean_loss(losses)
            counted = torch.tensor([(numbers**2).sum() / shares, len(samples) / shares])
            metrics = {"numbers": numbers.mean() / shares, "squares": counted}
            if 0 in samples:
                metrics["rare"] = numbers.mean() / shares + 1.0 / shares
            return mean, told | metrics | {"same": mean.detach()}

        return output, telling
