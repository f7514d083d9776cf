"""Numbers of workers that divide neither the batch nor the layers train as any others do.

Real processes over gloo, fp32; each layout trains from the same start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from liver_hpc.layout.batch import share_of
from liver_hpc.layout.coordinates import Layout
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.telling import TellingGPT
from tests.integration.worlds import Case, apart, connected, recipe_of, train_cases

pytestmark = pytest.mark.timeout(300)

STEPS = 6
EQUAL = 1e-5
"""How far apart losses and gradient norms may be, relatively."""


def cases(layouts: list[str], global_batch: int, **model: Any) -> list[Case]:
    return [Case(layout, model, {"global_batch": global_batch}, steps=STEPS) for layout in layouts]


def check_equal(layouts: list[str], tmp_path: Path, global_batch: int, **model: Any) -> None:
    """Every layout, on each of its workers, trains as the first one does."""
    seated = [Layout.parse(layout).workers for layout in layouts]
    answers = run_workers(train_cases, max(seated), tmp_path, cases(layouts, global_batch, **model))
    wanted = answers[0][0]
    assert len(wanted) == STEPS
    assert wanted[-1][0] < wanted[0][0]
    for number, layout in enumerate(layouts):
        for answer in answers[: seated[number]]:
            assert apart(answer[number], wanted) <= EQUAL, layout


@pytest.mark.long
def test_seven_of_eight_workers_train_as_eight_do(tmp_path: Path) -> None:
    """Eight micro-batches: one of the seven workers computes two of them."""
    check_equal(["dp8", "dp7", "dp1"], tmp_path, 8)


def test_workers_that_do_not_divide_the_batch_train_as_one_does(tmp_path: Path) -> None:
    layouts = ["dp1", "dp3", "tp2 dp3", "pp2 dp3", "pp3", "pp2"]
    check_equal(layouts, tmp_path, 4)
    shares = [len(share_of(4, Layout.parse("dp3"), rank).numbers) for rank in range(3)]
    assert shares == [2, 1, 1]


def test_pipelines_that_do_not_divide_the_layers_train_as_one_stage_does(tmp_path: Path) -> None:
    """Three layers, and an output layer that is worth one of them."""
    layouts = ["pp1", "pp2", "pp3", "pp2 dp3"]
    check_equal(layouts, tmp_path, 4, layers=3, vocab_size=512, tied_embeddings=False)


def unweighed(process: WorkerProcess, of: list[Case]) -> list[Any]:
    """As Megatron alone has it: the mean over a rank's own micro-batches, then over ranks."""

    def share(*arguments: Any) -> Any:
        return share_of(*arguments)._replace(weight=1.0)

    with mock.patch("liver_hpc.world.batches.share_of", share):
        return train_cases(process, of)


def test_without_their_weights_uneven_batches_would_give_another_gradient(tmp_path: Path) -> None:
    answers = run_workers(unweighed, 3, tmp_path, cases(["dp1", "dp3"], 4))
    alone, shared = answers[0]
    assert shared[0][0] == pytest.approx(alone[0][0], rel=EQUAL)  # losses are counted one by one
    assert apart(shared[:1], alone[:1]) > 1e-3


def metrics_of(process: WorkerProcess, layouts: list[str]) -> list[list[dict[str, float]]]:
    """Metrics, and the loss, of two steps in each layout; empty where this worker has no seat."""
    from liver_hpc.world.steps import Flags

    found = []
    for generation, layout in enumerate(layouts):
        recipe = recipe_of(Case(layout, {}, {"global_batch": 4}, TellingGPT), process.worker)
        with connected(process, recipe, layout, generation) as world:
            steps = range(0 if world is None else 2)
            results = [
                world.agree(world.forward_backward(step), world.update(step), Flags())
                for step in steps
            ]
            found.append([{**result.metrics, "loss": result.loss} for result in results])
    return found


def test_metrics_are_the_same_in_every_layout_and_known_to_all(tmp_path: Path) -> None:
    """Whether batches are even, whether samples are split, and whoever has the last stage."""
    layouts = ["dp1", "dp3", "tp2 pp2", "pp2 cp2"]
    answers = run_workers(metrics_of, 4, tmp_path, layouts)
    for number, text in enumerate(layouts):
        for answer in answers[: Layout.parse(text).workers]:
            first, second = answer[number]
            told = {name: pytest.approx(value) for name, value in first.items()}
            assert told == {
                "numbers": 1.5,
                "squares": 3.5,
                "rare": 1.0,
                "same": first["loss"],
                "loss": answers[0][0][0]["loss"],
            }
            assert (second["numbers"], second["squares"]) == (5.5, pytest.approx(31.5))
            assert "rare" not in second
            assert second["same"] == pytest.approx(second["loss"])
