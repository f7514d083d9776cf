from __future__ import annotations

import pytest
import torch

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.world.rehearsed import Shapes

TENSORS = [torch.zeros(4, 2), torch.zeros(3)]


def shapes_at(layout: str, at: tuple[int, int, int]) -> Shapes:
    return Shapes.of_seat("spec", 1, Layout.parse(layout), Coordinate(*at), TENSORS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("dp2", (0, 0, 0)), ("dp4", (0, 0, 3))),
        (("tp2", (0, 0, 0)), ("tp2 dp2", (1, 0, 1))),
        (("pp4", (0, 1, 0)), ("pp4", (0, 2, 0))),
    ],
)
def test_replicas_shares_and_middle_stages_run_the_same_kernels(
    one: tuple[str, tuple[int, int, int]], other: tuple[str, tuple[int, int, int]]
) -> None:
    assert shapes_at(*one) == shapes_at(*other)


@pytest.mark.parametrize(
    "other",
    [
        ("tp2", (0, 0, 0)),
        ("pp2", (0, 0, 0)),
        ("cp2", (0, 0, 0)),
    ],
)
def test_what_splits_activations_runs_others(other: tuple[str, tuple[int, int, int]]) -> None:
    assert shapes_at("dp2", (0, 0, 0)) != shapes_at(*other)


def test_the_ends_of_a_pipeline_run_others() -> None:
    seats = {shapes_at("pp4", (0, stage, 0)) for stage in range(4)}
    assert len(seats) == 3
