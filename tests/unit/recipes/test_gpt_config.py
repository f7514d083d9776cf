"""The GPT recipe's `model` section: presets, and sizes that do not fit together."""

from __future__ import annotations

from typing import Any

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
    given = {"preset": "qwen3-30b-a3b", "experts": {"number": 64}}
    experts, whole = GPTConfig.model_validate(given).experts, GPTConfig(preset="qwen3-30b-a3b")
    assert experts == whole.experts.model_copy(update={"number": 64})


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


# ---- experts


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"topk": 4}, r"experts\n.*number is 0, so that no layer has experts, but topk is given"),
        ({"number": True, "topk": 1}, r"experts\.number\n.*valid integer"),
        ({"number": 2, "topk": 3}, r"experts\n.*topk 3 is more than the number of experts, 2"),
        ({"number": 4, "bias_update_rate": 0.1}, r"experts\n.*wants score_function sigmoid"),
        ({"number": 4, "aux_loss_coeff": 0.1}, r"experts\n.*none with aux_loss_coeff 0.1"),
        (
            {"number": 4, "load_balancing": "aux_loss"},
            r"experts\n.*aux_loss with aux_loss_coeff 0.0",
        ),
        ({"number": 4, "load_balancing": "sinkhorn"}, r"experts\.load_balancing\n.*'seq_aux_loss'"),
        ({"number": 4, "layer_freq": [1, 0]}, r"layer_freq names 2 layers, the model has 4"),
        ({"number": 4, "capacity": 1}, r"experts\.capacity\n"),
        ({"number": 4, "z_loss_coeff": float("inf")}, r"z_loss_coeff\n.*finite number"),
    ],
)
def test_experts_that_do_not_fit_together_are_refused_by_key(
    experts: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        GPTConfig.model_validate({"experts": experts})


def test_experts_have_no_biases() -> None:
    with pytest.raises(ValidationError, match="bias: Megatron splits no biases of experts"):
        GPTConfig.model_validate({"bias": True, "experts": {"number": 4}})


@pytest.mark.parametrize(
    ("freq", "layers"), [(1, (1, 1, 1, 1)), (2, (1, 0, 1, 0)), ([0, 1, 1, 1], (0, 1, 1, 1))]
)
def test_layers_with_experts(freq: Any, layers: tuple[int, ...]) -> None:
    config = GPTConfig.model_validate({"experts": {"number": 4, "layer_freq": freq}})
    assert config.layers_with_experts == tuple(map(bool, layers))
