"""What the layers of a GPT cost, by rule and as they were measured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from liver_hpc.layout.stages import LayerCosts, stage_layers
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.gpt_costs import layer_costs

SIZES = {"layers": 4, "hidden": 64, "ffn_hidden": 128, "heads": 4, "seq_length": 32}


def test_operations_of_matrices_are_twice_their_elements() -> None:
    config = GPTConfig(**SIZES, query_groups=2, vocab_size=256)
    attention = 64 * (64 + 2 * 32) + 64 * 64  # queries, keys and values; their projection
    scores = 2 * 32 * 64
    costs = layer_costs(config)
    assert costs.layers == (2 * (attention + scores + 3 * 64 * 128),) * 4
    assert costs.output == pytest.approx(2 * 64 * 256, rel=0.05)
    assert costs.embedding < costs.output / 100


def test_a_layer_with_experts_costs_those_that_a_token_goes_to() -> None:
    experts = {"number": 8, "topk": 2, "ffn_hidden": 128, "layer_freq": (0, 1, 1, 1)}
    dense, *sparse = layer_costs(GPTConfig(**SIZES, experts=experts)).layers
    assert len(set(sparse)) == 1
    router, expert = 2 * 64 * 8, 2 * 3 * 64 * 128
    assert sparse[0] - dense == router + expert
    shared = layer_costs(GPTConfig(**SIZES, experts=experts | {"shared_ffn_hidden": 64})).layers
    assert shared[1] - sparse[0] == expert / 2


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    config = GPTConfig(preset="llama3-8b")
    assert stage_layers(layer_costs(config), 4) == (8, 8, 9, 7)


def test_measured_times_take_the_place_of_operations() -> None:
    config = GPTConfig(**SIZES, layer_times={"embedding": 0.1, "layer": 0.5, "output": 2.0})
    assert layer_costs(config) == LayerCosts((0.5,) * 4, 0.1, 2.0)
    assert stage_layers(layer_costs(config), 2) == (3, 1)
    each = {"embedding": 0.1, "layer": [4.0, 0.5, 0.5, 0.5], "output": 0.1}
    assert stage_layers(layer_costs(GPTConfig(**SIZES, layer_times=each)), 2) == (1, 3)


def test_times_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"layer_times\.layer has 2 values for 4 layers"):
        GPTConfig(**SIZES, layer_times={"embedding": 1.0, "layer": [1.0, 1.0], "output": 1.0})
