"""A world trains as a loop of Megatron's own does, which has nothing of ours but the model."""

from __future__ import annotations

from collections.abc import Sequence
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
CLIP_GRAD = 0.5


def case_of(dtype: str = "fp32", train: Any = None, optimizer: Any = None) -> Case:
    sections = {
        "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 1, **(train or {})},
        "optimizer": {**ADAM, "clip_grad": CLIP_GRAD, **(optimizer or {})},
        "schedule": {"style": "constant"},
    }
    return Case("dp1", {"dtype": dtype}, sections=sections)


CASES = {
    "fp32": case_of(),
    "bf16": case_of("bf16"),
    "gradients in bf16": case_of("bf16", {"grad_reduce_in_bf16": True}),
    "decoupled": case_of(optimizer={"decoupled_lr": 0.003}),
}


def trained(process: WorkerProcess, cases: Sequence[Case]) -> list[Any]:
    """Of each case the first parameters by name, and the course of the steps."""
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.megatron import as_built
    from tests.integration.toys import derived

    found = []
    for generation, case in enumerate(cases):
        recipe = recipe_of(case.model, **case.sections)
        recipe.spec = derived(recipe, case.layout)
        install_sentinel(process.worker)
        with connected(process, recipe, case.layout, generation) as world:
            assert world is not None
            world.state.begin_optimizer()  # with copies of the parameters as they are
            module = as_built(world.chunks[0])
            parameters = module.named_parameters()
            first = {name: one.detach().clone().float().numpy() for name, one in parameters}
            found.append((first, train(world, range(STEPS))))
    return found


@pytest.mark.timeout(200)
def test_losses_and_gradient_norms_are_those_of_megatrons_own_loop(tmp_path: Path) -> None:
    """With each number of the optimizer's another one than its default; clipping bites."""
    (found,) = run_workers(trained, 1, tmp_path, [*CASES.values()])
    plain = {}
    with Pool(1, partial(MegatronJob, str(tmp_path / "job"), 1)) as jobs:
        for (name, one), (first, course) in zip(CASES.items(), found, strict=True):
            (plain[name],) = jobs.call(f"train in {name}", 60.0, "train", one, first, STEPS)
            assert all(grad_norm > CLIP_GRAD for _, grad_norm in plain[name])
            assert apart(course, plain[name]) < 1e-6, name
    assert apart(plain["gradients in bf16"], plain["bf16"]) > 1e-5
    assert apart(plain["decoupled"], plain["fp32"]) > 1e-3
