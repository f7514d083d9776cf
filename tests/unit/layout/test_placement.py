"""What workers hold of seats: all pairs at once against the boxes of one pair."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.memory import handoff_bytes
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.placement import overlap_matrix, place
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.unit.layout.models import LAYOUTS, MODELS, TIED, rank_map


def overlap_bytes(
    model: ModelSpec, source: Layout, at: Coordinate, target: Layout, to: Coordinate
) -> int:
    """Bytes that a worker at `at` already holds of what `to` will need."""
    held = set(model.held_tensors(source, at))
    total = 0
    for index in model.held_tensors(target, to):
        if index not in held:
            continue
        for kind in (PARAMETER, *model.optimizer_kinds):
            needed = owned_boxes(model, target, to, kind, index)
            elements = sum(
                common.elements
                for have in owned_boxes(model, source, at, kind, index)
                for box in needed
                if (common := have.intersect(box)) is not None
            )
            total += elements * model.element_bytes(kind, index)
    return total


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.sampled_from(MODELS))
def test_every_pair_as_its_boxes_say(source: Layout, target: Layout, model: ModelSpec) -> None:
    expected = [
        [overlap_bytes(model, source, at, target, to) for to in target.coordinates()]
        for at in source.coordinates()
    ]
    assert (overlap_matrix(model, source, target) == np.array(expected)).all()


def test_overlap_is_the_local_part_of_the_plan() -> None:
    source = rank_map(Layout(1, 1, 2))
    target = RankMap(Layout(2, 1, 2), (0, 1, 2, 3))
    stays = overlap_matrix(TIED, source.layout, target.layout)
    kept = sum(
        stays[source.layout.rank(at), target.layout.rank(to)]
        for worker in source.workers
        if (at := source.coordinate_of(worker)) and (to := target.coordinate_of(worker))
    )
    assert kept == handoff_bytes(TIED, source, target)[1]


def test_a_large_model_on_many_workers_is_placed_while_the_coordinator_waits() -> None:
    model = gpt_spec(
        GPTConfig(
            layers=32,
            hidden=4096,
            ffn_hidden=14336,
            heads=32,
            query_groups=8,
            vocab_size=128256,
            dtype="bf16",
            tied_embeddings=False,
        )
    )
    source = rank_map(Layout(4, 2, 8))
    began_s = time.process_time()
    placed = place(model, source, Layout(8, 2, 4), range(64))
    assert sorted(placed.workers) == list(range(64))
    assert time.process_time() - began_s < 1.0  # tens of milliseconds, on a machine at rest
