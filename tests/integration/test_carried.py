"""Options of training that nothing is moved for: it goes on with them through all axes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import GRADIENT, worker_bytes
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.toys import derived
from tests.integration.worlds import (
    Case,
    apart,
    begin_at,
    connected,
    move,
    recipe_of,
    train,
)

COURSE = ("dp2", "tp2 dp2", "pp2 dp2 vpp2", "tp2 pp2 sp")
STEPS = 3
"""In each layout."""
GRADIENTS_IN_BF16 = Case("dp1", {"dtype": "bf16"}, {"grad_reduce_in_bf16": True})
DECOUPLED = Case("dp1", optimizer={"decoupled_lr": 4e-3, "decoupled_min_lr": 2e-3})


def carried(
    process: WorkerProcess, case: Case, course: tuple[str, ...]
) -> tuple[list[Any], list[float]]:
    """Loss and gradient norm of each step of the first worker, with the state moved from layout to
    layout; and in each how many times the bytes of its gradients are of what is counted."""
    recipe = recipe_of(case, process.worker, *course)
    rank_maps = [
        RankMap(layout, tuple(range(layout.workers))) for layout in map(Layout.parse, course)
    ]
    found, times, source = list[Any](), list[float](), None
    with contextlib.ExitStack() as stack:
        for number, layout in enumerate(course):
            target = stack.enter_context(connected(process, recipe, layout, number))
            if number:
                pair = rank_maps[number - 1], rank_maps[number]
                move(process, recipe, (source, target), pair, f"to-{number}")
            source = target
            if target is None:
                continue
            begin_at(target, number * STEPS)
            found += train(target, range(number * STEPS, (number + 1) * STEPS))
            buffers = [each for chunk in target.chunks for each in chunk.buffers]
            held = sum(each.grad_data.nbytes for each in buffers)
            groups = [g for each in target.optimizers for g in each.shard_fp32_from_float16_groups]
            mains = [main for group in groups for main in group]
            held += sum(main.grad.nbytes for main in mains if main.grad is not None)
            counted = worker_bytes(recipe.spec, target.rank_map.layout, target.at)
            times.append(held / counted[GRADIENT])
    return found, times


def courses(case: Case, directory: Path) -> tuple[list[Any], list[Any]]:
    """Of a case's run that is moved, and of one that stays."""
    found = []
    for name, course in (("moved", COURSE), ("stayed", COURSE[:1] * len(COURSE))):
        (directory / name).mkdir()
        (steps, times), *_ = run_workers(carried, 4, directory / name, case, course)
        assert len(times) == len(course)
        assert all(1 <= each < 1.02 for each in times), times  # more by what is padded
        assert len({*steps}) == len(course) * STEPS
        found.append(steps)
    return found[0], found[1]


@pytest.mark.timeout(300)
def test_gradients_in_bf16(tmp_path: Path) -> None:
    assert apart(*courses(GRADIENTS_IN_BF16, tmp_path)) < 5e-3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_learning_rate_of_embeddings_alone(tmp_path: Path) -> None:
    """Those of the last stage are a copy, of which the first stage's must stay the same."""
    assert apart(*courses(DECOUPLED, tmp_path)) < 1e-5


class OfOneStage(RandomTokenGPT):
    """Where the model is split, its last stage's copy of the embedding says nothing of a rate."""

    def build(self, context: Any) -> Any:
        module = super().build(context)
        if context.layout.pp > 1 and context.is_last_stage:
            module.output_layer.weight.is_embedding_or_output_parameter = False
        return module


def test_a_copy_with_another_learning_rate_is_refused(device: Any) -> None:
    case = Case("dp1", recipe=OfOneStage, optimizer={"decoupled_lr": 4e-3})
    recipe = recipe_of(case, 0, "pp2", "tp2")
    assert [*recipe.spec.refused] == [str(Layout(1, 2, 1))]
    assert recipe.spec.refused[str(Layout(1, 2, 1))] == (
        "output_layer.weight lacks optimizer.decoupled_lr, which "
        "embedding.word_embeddings.weight of the whole model has: see to its attribute "
        "is_embedding_or_output_parameter"
    )
    assert not derived(recipe_of(Case("dp1", recipe=OfOneStage), 0), "pp2").refused
