"""Layers of stages, against all divisions that there are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import ConfigError
from liver_hpc.layout.stages import LayerCosts, stage_layers

COST = st.floats(0.0, 100.0)


def divisions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage at least one layer."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


def stage_costs(costs: LayerCosts, counts: tuple[int, ...]) -> list[float]:
    """What each stage costs that has so many of the layers."""
    ends = itertools.accumulate(counts, initial=0)
    stages = [sum(costs.layers[begin:end]) for begin, end in itertools.pairwise(ends)]
    stages[0] += costs.embedding
    stages[-1] += costs.output
    return stages


@given(st.lists(COST, min_size=1, max_size=8), COST, COST, st.data())
def test_no_division_has_a_faster_slowest_stage(
    layers: list[float], embedding: float, output: float, data: st.DataObject
) -> None:
    costs = LayerCosts(tuple(layers), embedding, output)
    stages = data.draw(st.integers(1, len(layers)))
    counts = stage_layers(costs, stages)
    assert counts in set(divisions(len(layers), stages))
    least = min(max(stage_costs(costs, other)) for other in divisions(len(layers), stages))
    assert max(stage_costs(costs, counts)) == pytest.approx(least)


@pytest.mark.parametrize(
    ("layers", "output", "stages", "counts"),
    [
        (4, 0.0, 2, (2, 2)),
        (8, 0.5, 4, (2, 2, 2, 2)),
        (3, 0.0, 3, (1, 1, 1)),
        (3, 0.5, 2, (2, 1)),
        (32, 2.4, 4, (8, 9, 9, 6)),
        (8, 4.0, 2, (6, 2)),
        (4, 90.0, 2, (3, 1)),
    ],
)
def test_the_output_layer_takes_the_place_of_layers(
    layers: int, output: float, stages: int, counts: tuple[int, ...]
) -> None:
    assert stage_layers(LayerCosts((1.0,) * layers, 0.0, output), stages) == counts


def test_layers_that_cost_differently_are_weighed() -> None:
    """As a dense layer before mixtures of experts."""
    assert stage_layers(LayerCosts((1.0, 1.0, 1.0, 3.0)), 2) == (3, 1)
    assert stage_layers(LayerCosts((1.0, 4.0, 4.0, 1.0), embedding=2.0), 2) == (2, 2)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pp=5 is more than the model's 4 layers"):
        stage_layers(LayerCosts((1.0,) * 4), 5)


def test_a_large_model_takes_no_time() -> None:
    began_s = time.monotonic()
    counts = stage_layers(LayerCosts((1.0,) * 126, 0.01, 1.4), 16)
    assert time.monotonic() - began_s < 5.0
    assert sum(counts) == 126
    assert max(counts) - min(counts) <= 2
