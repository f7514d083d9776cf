from __future__ import annotations

import pytest
import torch

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.world import rehearsed, thread
from liver_hpc.world.rehearsed import Shapes, shapes_of
from tests.unit.layout.models import TIED


def shapes_at(layout: str, at: tuple[int, int, int]) -> Shapes:
    return shapes_of(TIED, 1, Layout.parse(layout), Coordinate(*at))


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


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has rehearsed nothing."""
    monkeypatch.setattr(rehearsed, "_rehearsed", set())


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FIRST, OTHER = shapes_at("tp2", (0, 0, 0)), shapes_at("pp2", (0, 0, 0))


def test_a_process_on_cpus_learns_all_from_one_rehearsal() -> None:
    assert not rehearsed.known(FIRST, CPU)
    rehearsed.remember(FIRST)
    assert rehearsed.known(FIRST, CPU)
    assert rehearsed.known(OTHER, CPU)


def test_kernels_of_a_gpu_are_made_for_shapes() -> None:
    rehearsed.remember(FIRST)
    assert rehearsed.known(FIRST, CUDA)
    assert not rehearsed.known(OTHER, CUDA)


def test_a_rehearsal_within_another_one_ends_alone() -> None:
    """As of who derives a spec while it builds a world beside training."""
    with thread.rehearsal():
        with thread.rehearsal():
            pass
        assert thread.here.rehearsing
    assert not thread.here.rehearsing
