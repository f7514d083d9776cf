"""The GPT recipe's `model` section: presets, and sizes that do not fit together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.presets import PRESETS

PUBLISHED = {"llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9}
"""Parameters, as the models' cards say."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_the_published_model(name: str) -> None:
    spec = gpt_spec(GPTConfig(preset=name), pps=[1])
    assert spec.elements == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_every_preset_is_valid() -> None:
    for name in PRESETS:
        assert GPTConfig(preset=name).preset == name


def test_what_is_given_comes_before_the_preset() -> None:
    config = GPTConfig.model_validate({"preset": "llama3-8b", "layers": 2, "dtype": "fp32"})
    assert (config.layers, config.dtype, config.hidden) == (2, "fp32", 4096)


def test_an_unknown_preset_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match=r"preset\n.*wanted one of llama3-405b.*got 'gpt5'"):
        GPTConfig(preset="gpt5")


def test_heads_may_be_wider_than_their_share_of_the_hidden_size() -> None:
    config = GPTConfig(hidden=24, heads=4, head_dim=8)
    (projection,) = [
        t
        for t in gpt_spec(config).tensors
        if t.name.endswith("0.self_attention.linear_proj.weight")
    ]
    assert (config.head_width, projection.shape) == (8, (24, 32))
