"""`liver check-model --times`: what it says goes into the run file, and decides on the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from liver_hpc.cli.check_model import measured_times
from liver_hpc.errors import ConfigError
from liver_hpc.layout.stages import LayerCosts, stage_layers
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.gpt_costs import layer_costs
from tests.integration.runs import TINY_MODEL, run_config

pytestmark = pytest.mark.timeout(200)


def costs_measured(tmp_path: Path, **model: Any) -> LayerCosts:
    """By the times that the command prints for a model, pasted into its section."""
    said = yaml.safe_load(measured_times(run_config(tmp_path, 10, model=model)))
    assert [*said] == ["model"]
    return layer_costs(GPTConfig.model_validate({**TINY_MODEL, **model, **said["model"]}))


def test_an_output_layer_that_is_worth_many_layers_is_seen(tmp_path: Path) -> None:
    costs = costs_measured(tmp_path, vocab_size=65536)
    assert len(set(costs.layers)) == 1
    assert costs.output > 2 * costs.layers[0]
    assert costs.embedding > 0
    assert stage_layers(costs, 2) == (3, 1)


def test_layers_of_several_sizes_have_each_a_time_also_where_they_are_computed_again(
    tmp_path: Path,
) -> None:
    experts = {"number": 4, "topk": 4, "ffn_hidden": 512, "layer_freq": [0, 0, 0, 1]}
    costs = costs_measured(tmp_path, experts=experts, recompute="full")
    *dense, sparse = costs.layers
    assert min(costs.layers) > 0
    assert sparse > max(dense)


def test_a_recipe_without_the_option_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, 10, recipe="tests.fakes:TinyRecipe")
    with pytest.raises(ConfigError, match="TinyRecipe has no option layer_times"):
        measured_times(config.model_copy(update={"model": {}}))
