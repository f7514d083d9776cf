"""A world trains as a loop of Megatron's own does, which has nothing of ours but the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transitions.pool import Pool
from tests.integration.megatron_job import Case, MegatronJob, recipe_of
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import apart, connected, train

STEPS = 4
ADAM = {"lr": 0.01, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.97, "eps": 1e-3}
CASE = Case(
    "dp1",
    sections={
        "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 1},
        "optimizer": {**ADAM, "clip_grad": 0.5},
        "schedule": {"style": "constant"},
    },
)


def trained(process: WorkerProcess) -> Any:
    """The first parameters by name, and the course of the steps."""
    from liver_hpc.world.groups import install_sentinel
    from tests.integration.toys import derived

    recipe = recipe_of(CASE.model, **CASE.sections)
    recipe.spec = derived(recipe, CASE.layout)
    install_sentinel(process.worker)
    with connected(process, recipe, CASE.layout, 0) as world:
        assert world is not None
        module = world.chunks[0].module
        first = {name: each.detach().clone().numpy() for name, each in module.named_parameters()}
        return first, train(world, range(STEPS))


@pytest.mark.timeout(200)
def test_losses_and_gradient_norms_are_those_of_megatrons_own_loop(tmp_path: Path) -> None:
    """With each number of the optimizer's another one than its default; clipping bites."""
    ((first, course),) = run_workers(trained, 1, tmp_path)
    with Pool(1, partial(MegatronJob, str(tmp_path / "job"), 1)) as jobs:
        (plain,) = jobs.call("train", 60.0, "train", CASE, first, STEPS)
    assert all(grad_norm > CASE.sections["optimizer"]["clip_grad"] for _, grad_norm in plain)
    assert apart(course, plain) < 1e-6
