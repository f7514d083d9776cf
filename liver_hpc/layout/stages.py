"""How many layers each stage of a pipeline gets, so that the slowest stage is least.

The slowest stage sets a pipeline's pace. The first stage has the embeddings besides its layers, the
last one the output layer and the loss, which with a large vocabulary cost as much as some layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

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

    def stages(self, counts: tuple[int, ...]) -> tuple[float, ...]:
        """What each stage costs that has so many of the layers."""
        ends = list(itertools.accumulate(counts))
        return tuple(self.stage(end - count, end) for count, end in zip(counts, ends, strict=True))

    def stage(self, begin: int, end: int) -> float:
        """The cost of the stage that has the layers from `begin` to before `end`."""
        cost = self._before[end] - self._before[begin]
        cost += self.embedding if begin == 0 else 0.0
        return cost + (self.output if end == len(self.layers) else 0.0)

    @cached_property
    def _before(self) -> tuple[float, ...]:
        """What all layers before each cost together."""
        return tuple(itertools.accumulate(self.layers, initial=0.0))


def stage_layers(costs: LayerCosts, stages: int) -> tuple[int, ...]:
    """Layers of each stage, at least one, such that the costliest stage costs least.

    Exact. Of several such divisions it takes one whose later stages are divided as well as can be
    too, and alike; the same one everywhere. Raises ConfigError for too few layers.
    """
    if stages > len(costs.layers):
        raise ConfigError(f"pp={stages} is more than the model's {len(costs.layers)} layers")
    return _divisions(costs)[stages - 1]


@lru_cache(maxsize=64)
def _divisions(costs: LayerCosts) -> tuple[tuple[int, ...], ...]:
    """The layers of each of 1, 2, ... stages; takes time as the number of layers cubed."""
    layers = len(costs.layers)
    # Of the layers from `begin` on, in one stage, in two, ...: the costliest stage, the sum of the
    # squares, and where the first stage ends.
    tails = [{begin: (cost := costs.stage(begin, layers), cost * cost, layers)
              for begin in range(layers)}]  # fmt: skip
    for _ in range(1, layers):
        tails.append({begin: _best(costs, begin, tails[-1]) for begin in [*tails[-1]][:-1]})
    return tuple(_unrolled(tails[:stages]) for stages in range(1, layers + 1))


Tail = tuple[float, float, int]


def _best(costs: LayerCosts, begin: int, tails: dict[int, Tail]) -> Tail:
    """One more stage, from `begin` on, before tails that have been divided."""
    found = []
    for end, (slowest, squares, _) in tails.items():
        if end > begin:
            cost = costs.stage(begin, end)
            found.append((max(cost, slowest), cost * cost + squares, end))
    return min(found)


def _unrolled(tails: list[dict[int, Tail]]) -> tuple[int, ...]:
    """Layers of each stage, of all layers."""
    ends = [0]
    for tail in reversed(tails):
        ends.append(tail[ends[-1]][2])
    return tuple(end - begin for begin, end in itertools.pairwise(ends))
