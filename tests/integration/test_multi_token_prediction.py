"""Models that predict further tokens beside the next one: the same in every layout, and state that
goes from layout to layout. Real processes over gloo, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import PlanError
from liver_hpc.world import dropout
from tests.integration.moves import moved_and_stayed
from tests.integration.predicting import CarelessGPT, PredictingGPT
from tests.integration.processes import run_workers
from tests.integration.test_experts import AUX, BIAS, SIZES, model
from tests.integration.toys import build_world, derived
from tests.integration.worlds import Case, apart, recipe_of, train_cases

pytestmark = pytest.mark.timeout(300)

DENSE = SIZES | {"layers": 4}
UNTIED = DENSE | {"tied_embeddings": False}
MODELS = {"tied": DENSE, "untied": UNTIED, "experts": model(**AUX, **BIAS) | UNTIED}
LAYOUTS = {
    "tied": ["dp1", "dp3", "tp2 sp"],
    "untied": ["dp1", "dp3", "tp2", "tp2 sp", "pp2", "pp2 dp2", "pp2 vpp2"],
    "experts": ["dp1", "dp2 ep2", "tp2 sp", "pp2 dp2 ep2"],
}


@pytest.mark.parametrize(
    "name", ["tied", pytest.param("untied", marks=pytest.mark.long), "experts"]
)
def test_what_is_predicted_further_counts_the_same_in_every_layout(
    name: str, tmp_path: Path
) -> None:
    """Also of four micro-batches that 3 ranks cannot share evenly."""
    options, layouts = MODELS[name], LAYOUTS[name]
    batch = {"global_batch": 4}
    cases = [Case(layout, options, batch, PredictingGPT) for layout in layouts]
    cases.append(Case("dp1", options, batch, CarelessGPT))
    wanted, *others, careless = run_workers(train_cases, 4, tmp_path, cases)[0]
    assert apart(careless, wanted) > 1e-3
    found = dict(zip(layouts[1:], (apart(course, wanted) for course in others), strict=True))
    assert max(found.values()) < 1e-5, found


def test_what_predicts_them_moves_between_layouts(tmp_path: Path) -> None:
    """The embedding has a copy on the last stage, too."""
    chain = ["dp2", "tp2 sp", "pp2", "pp2 vpp2", "dp1"]
    moved, stay = moved_and_stayed(Case("dp1", UNTIED, recipe=PredictingGPT), chain, tmp_path)
    assert apart(moved["course"], stay["course"]) < 1e-5


def test_the_layers_that_predict_them_have_dropout_of_their_own(device: Any) -> None:
    world = build_world(recipe_of(Case("dp1", UNTIED, recipe=PredictingGPT), 0), device)
    numbers = [number for number, _ in dropout._layers(world.chunks[0].module)]
    assert numbers == [1, 2, 3, 4, 5, 6]
    world.close()


@pytest.mark.parametrize(
    ("changed", "layout", "why"),
    [
        ({}, "cp2", "sends tokens to neighbouring ranks over the default group"),
        ({"tied_embeddings": True}, "pp2", "Megatron saves no checkpoint; untie them"),
    ],
)
def test_where_megatron_cannot_predict_further_tokens_is_refused(
    changed: dict[str, Any], layout: str, why: str, device: Any
) -> None:
    recipe = recipe_of(Case("dp1", UNTIED | changed, recipe=PredictingGPT), 0)
    (said,) = derived(recipe, layout).refused.values()
    assert why in said


def test_layers_that_megatron_would_not_compute_again_together_are_refused(device: Any) -> None:
    again = UNTIED | {"recompute": "full", "recompute_num_layers": 2}
    with pytest.raises(PlanError, match="with recompute_num_layers 2: Megatron wants 1"):
        recipe_of(Case("dp1", again, recipe=PredictingGPT), 0)
