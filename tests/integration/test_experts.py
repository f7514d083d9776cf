"""Mixtures of experts and sequence parallelism compute what one worker computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import run_workers
from tests.integration.worlds import Case, apart, train_cases

SIZES = {"layers": 2, "hidden": 32, "ffn_hidden": 48, "seq_length": 16, "init_std": 0.1}
EXPERTS = {"number": 4, "ffn_hidden": 40}
BIAS = {"score_function": "sigmoid", "bias_update_rate": 0.05}


def model(**experts: Any) -> dict[str, Any]:
    return SIZES | {"experts": EXPERTS | experts}


MODELS = {
    "aux": model(load_balancing="aux_loss", aux_loss_coeff=0.05, z_loss_coeff=0.01),
    "seq": model(load_balancing="seq_aux_loss", aux_loss_coeff=0.05, shared_ffn_hidden=24, **BIAS),
    "gather": model(dispatcher="allgather", layer_freq=2, **BIAS),
}
LAYOUTS = ["dp1", "dp2 ep2", "tp2 sp", "tp2 dp2 ep2 sp", "pp2 dp2 ep2", "dp4 ep4", "dp4 ep2"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_norm_are_those_of_one_worker(name: str, tmp_path: Path) -> None:
    cases = [Case(layout, MODELS[name]) for layout in LAYOUTS]
    whole, *others = run_workers(train_cases, 4, tmp_path, cases)[0]
    found = {
        layout: apart(course, whole) for layout, course in zip(LAYOUTS[1:], others, strict=True)
    }
    assert max(found.values()) < 1e-5, found
