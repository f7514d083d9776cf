"""Mixtures of experts and sequence parallelism compute what one worker computes, and go on so where
their state moves between layouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.moves import moved_and_stayed
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import (
    Case,
    apart,
    connected,
    recipe_of,
    train,
    train_cases,
)

SIZES = {"layers": 2, "hidden": 32, "ffn_hidden": 48, "seq_length": 16, "init_std": 0.1}
BIAS = {"score_function": "sigmoid", "bias_update_rate": 0.05}
AUX = {"load_balancing": "aux_loss", "aux_loss_coeff": 0.05, "z_loss_coeff": 0.01}
SEQ_AUX = {"load_balancing": "seq_aux_loss", "aux_loss_coeff": 0.05}


def model(dtype: str = "fp32", **experts: Any) -> dict[str, Any]:
    return SIZES | {"dtype": dtype, "experts": {"number": 4, "ffn_hidden": 40} | experts}


MODELS = {
    "dense": SIZES | {"normalization": "layernorm", "bias": True},
    "aux": model(**AUX),
    "seq-bias-shared": model(shared_ffn_hidden=24, **SEQ_AUX, **BIAS),
    # With two stages, the second one has no experts.
    "allgather": model(dispatcher="allgather", layer_freq=2, **AUX, **BIAS),
}
LAYOUTS = {
    "dense": ["dp1", "tp2 sp", "tp2 pp2 sp", "tp2 cp2 sp"],
    "aux": ["dp1", "dp2 ep2", "tp2 sp", "tp2 dp2 ep2 sp", "pp2 dp2 ep2", "dp4 ep2"],
    "seq-bias-shared": ["dp1", "tp2 cp2 ep2 sp", "pp2 cp2 ep2", "dp2 cp2 ep4", "pp2 dp2 ep2 vpp2"],
    "allgather": ["dp1", "dp2 ep2", "tp2 dp2 ep2 sp", "pp2 dp2 ep2"],
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("dense", "seq-bias-shared") else pytest.mark.long)
        for name in MODELS
    ],
)
def test_loss_and_gradient_norm_are_those_of_one_worker(name: str, tmp_path: Path) -> None:
    layers = {"layers": 4} if "pp2 dp2 ep2 vpp2" in LAYOUTS[name] else {}
    cases = [Case(layout, MODELS[name] | layers) for layout in LAYOUTS[name]]
    whole, *others = run_workers(train_cases, 4, tmp_path, cases)[0]
    courses = zip(LAYOUTS[name][1:], others, strict=True)
    found = {layout: apart(course, whole) for layout, course in courses}
    assert max(found.values()) < 1e-5, found


# ---- micro-batches that count nowhere


RECOMPUTING = {"recompute": "full"}
"""Layers count tokens in the backward pass."""


@pytest.mark.timeout(200)
def test_a_batch_that_ranks_with_experts_cannot_share_evenly_counts_as_on_one_worker(
    tmp_path: Path,
) -> None:
    """4 micro-batches on 3 ranks: two of them compute one more, of weight 0, whose tokens would
    else move the routers' biases."""
    uneven = model(number=6, **AUX, **BIAS)
    batch = {"global_batch": 4}
    cases = [
        Case("dp1", uneven, batch, steps=5),
        Case("dp3 ep3", uneven, batch, steps=5),
        Case("dp3 ep3", uneven | RECOMPUTING, batch, steps=5),
    ]
    whole, *others = run_workers(train_cases, 3, tmp_path, cases)[0]
    assert [apart(course, whole) < 1e-5 for course in others] == [True, True], (whole, others)


# ---- state on the move

CHAIN = ["dp2", "dp2 ep2", "tp2 dp2 ep2 sp", "pp2 cp2 ep2", "dp4 ep4", "dp1"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("dtype", "close"), [pytest.param("fp32", 1e-5, marks=pytest.mark.long), ("bf16", 0.02)]
)
def test_experts_and_their_bias_move_between_layouts(
    dtype: str, close: float, tmp_path: Path
) -> None:
    moved, stay = moved_and_stayed(Case("dp1", model(dtype, **SEQ_AUX, **BIAS)), CHAIN, tmp_path)
    assert apart(moved["course"], stay["course"]) < close
    if dtype == "fp32":
        assert moved["buffers"] == stay["buffers"]
    assert any(value for bias in stay["buffers"] for value in bias)


# ---- what a world leaves behind


def opened_files(process: WorkerProcess) -> list[int]:
    """How many files are open after each of some worlds was closed."""
    found = []
    for generation in range(4):
        recipe = recipe_of(Case("dp2 ep2", model(**AUX, **BIAS)), process.worker)
        with connected(process, recipe, "dp2 ep2", generation) as world:
            train(world, range(2))
        del world
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_a_closed_world_leaves_no_file_open(tmp_path: Path) -> None:
    for found in run_workers(opened_files, 2, tmp_path):
        assert found[1:] == [found[1]] * 3, found
