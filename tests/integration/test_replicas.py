"""Buffers of which each replica has its own are refused by name, before an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import PlanError
from liver_hpc.recipes.base import BuildContext
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.worlds import Case, connected, recipe_of


class Averaging(RandomTokenGPT):
    """Keeps what it has seen of its samples, or how often."""

    kept = "mean"

    def build(self, context: BuildContext) -> Any:
        import torch

        model = super().build(context)
        model.embedding.register_buffer("mean", torch.zeros(()))

        def average(module: Any, _inputs: Any, states: torch.Tensor) -> None:
            module.mean += states.detach().mean() if self.kept == "mean" else 1.0

        model.embedding.register_forward_hook(average)
        return model


class Counting(Averaging):
    kept = "calls"


def first_gradients(process: WorkerProcess, recipe: Any) -> str:
    case = Case("dp2", recipe=recipe)
    with connected(process, recipe_of(case, process.worker), case.layout, 0) as world:
        assert world is not None
        try:
            world.forward_backward(0)
        except PlanError as error:
            return str(error)
    return ""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("recipe", "refused"), [(Averaging, True), (Counting, False)])
def test_buffers_that_differ_between_replicas_are_refused(
    recipe: Any, refused: bool, tmp_path: Path
) -> None:
    """After a recovery all replicas would have those of one."""
    said = run_workers(first_gradients, 2, tmp_path, recipe)
    wanted = "embedding.mean: a forward leaves other values on each replica"
    assert [one.startswith(wanted) for one in said] == [refused] * 2, said
