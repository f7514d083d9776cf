"""How many layers each stage of a pipeline gets, so that the slowest stage is least.

The slowest stage sets a pipeline's pace. The first stage has the embeddings besides its layers, the
last one the output layer and the loss, which with a large vocabulary cost as much as some layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

from liver_hpc.errors import ConfigError


@dataclass(frozen=True)
class LayerCosts:
    """What the parts of a model cost, in order; in any one unit, as seconds or operations.

    layers: of each layer. embedding: of what comes before them. output: of what comes behind,
    the loss included.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    output: float = 0.0


def stage_layers(costs: LayerCosts, stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one, such that the costliest stage costs least.

    Exact. Of several such divisions it takes one whose later stages are divided as well as can be
    too, and alike; the same one everywhere. Raises ConfigError for too few layers.
    """
    if stages > len(costs.layers):
        raise ConfigError(f"pp={stages} is more than the model's {len(costs.layers)} layers")
    _, _, ends = _divisions(costs)(0, stages)
    return tuple(end - begin for begin, end in itertools.pairwise((0, *ends)))


Division = tuple[float, float, tuple[int, ...]]
"""The costliest stage, the sum of the squares, and where each stage ends."""


@lru_cache(maxsize=64)
def _divisions(costs: LayerCosts) -> Callable[[int, int], Division]:
    """Divides the layers from one on into so many stages; takes time as the number of layers cubed
    for all that may be asked."""
    layers, before = len(costs.layers), [*itertools.accumulate(costs.layers, initial=0.0)]

    def stage(begin: int, end: int) -> float:
        cost = before[end] - before[begin] + (costs.embedding if begin == 0 else 0.0)
        return cost + (costs.output if end == layers else 0.0)

    @cache
    def divided(begin: int, stages: int) -> Division:
        if stages == 1:
            cost = stage(begin, layers)
            return cost, cost * cost, (layers,)
        found = []
        for end in range(begin + 1, layers - stages + 2):
            cost = stage(begin, end)
            slowest, squares, ends = divided(end, stages - 1)
            found.append((max(cost, slowest), cost * cost + squares, (end, *ends)))
        return min(found)

    return divided
