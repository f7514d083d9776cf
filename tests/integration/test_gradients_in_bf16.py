"""Gradients that are added up and reduced in bf16: the state goes on through all axes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import GRADIENT, worker_bytes
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import Case, apart, begin_at, connected, move, recipe_of, train

COURSE = ("dp2", "tp2 dp2", "pp2 dp2 vpp2", "tp2 pp2 sp")
STEPS = 3
"""In each layout."""


def carried(process: WorkerProcess, course: tuple[str, ...]) -> tuple[list[Any], list[float]]:
    """Loss and gradient norm of each step of the first worker, with the state moved from layout to
    layout; and in each how many times the bytes of its gradients are of what is counted."""
    case = Case(course[-1], {"dtype": "bf16"}, {"grad_reduce_in_bf16": True})
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
            counted = worker_bytes(recipe.spec, target.rank_map.layout, target.at)
            times.append(held / counted[GRADIENT])
    return found, times


@pytest.mark.timeout(300)
def test_training_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    courses = {"stayed": ("dp2",) * len(COURSE), "moved": COURSE}
    found = {}
    for name, course in courses.items():
        (tmp_path / name).mkdir()
        (found[name], times), *_ = run_workers(carried, 4, tmp_path / name, course)
        assert len(times) == len(course)
        assert all(1 <= each < 1.02 for each in times), times  # more by what is padded
    assert len({*found["moved"]}) == len(COURSE) * STEPS
    assert apart(found["moved"], found["stayed"]) < 5e-3
