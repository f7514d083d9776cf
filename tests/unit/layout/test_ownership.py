from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.memory import GRADIENT, worker_bytes
from liver_hpc.layout.ownership import interval_boxes, owned_boxes, slabs
from liver_hpc.layout.tensors import EXP_AVG, PARAMETER, Box, ModelSpec, TensorSpec
from tests.unit.layout.models import LAYOUTS, MODELS


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_interval_boxes_cover_the_interval_once(start: int, length: int, cols: int) -> None:
    rows = (start + length) // cols + 1
    covered = np.zeros((rows, cols), dtype=int)
    boxes = interval_boxes(start, start + length, cols)
    for box in boxes:
        covered[box.row0 : box.row1, box.col0 : box.col1] += 1
    assert len(boxes) <= 3
    expected = np.zeros(rows * cols, dtype=int)
    expected[start : start + length] = 1
    assert (covered.reshape(-1) == expected).all()


def _count(tensor: TensorSpec, boxes: list[Box]) -> np.ndarray:
    covered = np.zeros((tensor.rows, tensor.cols), dtype=int)
    for box in boxes:
        covered[box.row0 : box.row1, box.col0 : box.col1] += 1
    return covered


def _copies_of_a_replica(model: ModelSpec, layout: Layout, index: int) -> int:
    """How often workers that hold one replica between them hold a tensor."""
    on_tp = layout.tp if model.tensors[index].tp_dim is None else 1
    return len(model.stages_of(index, layout)) * on_tp


@given(LAYOUTS, st.sampled_from(MODELS))
def test_every_replica_holds_every_parameter_once_and_all_ep_ranks_together_every_expert(
    layout: Layout, model: ModelSpec
) -> None:
    for index, tensor in enumerate(model.tensors):
        copies = _copies_of_a_replica(model, layout, index)
        together = layout.ep if tensor.expert else 1
        for first in range(0, layout.replicas, together):
            boxes = [
                box
                for at in layout.coordinates()
                if at.replica in range(first, first + together)
                for box in owned_boxes(model, layout, at, PARAMETER, index)
            ]
            assert (_count(tensor, boxes) == copies).all(), tensor.name


@given(LAYOUTS, st.sampled_from(MODELS))
def test_optimizer_state_of_what_is_trained_is_shared_by_all_that_hold_it(
    layout: Layout, model: ModelSpec
) -> None:
    for index, tensor in enumerate(model.tensors):
        trained = tensor.role == "trained"
        copies = _copies_of_a_replica(model, layout, index) if trained else 0
        boxes = [
            box
            for at in layout.coordinates()
            for box in owned_boxes(model, layout, at, EXP_AVG, index)
        ]
        assert (_count(tensor, boxes) == copies).all(), tensor.name


@given(LAYOUTS, st.sampled_from(MODELS))
def test_a_seat_holds_the_tensors_of_which_it_owns_boxes(layout: Layout, model: ModelSpec) -> None:
    for at in layout.coordinates():
        held = model.held_tensors(layout, at)
        assert len(set(held)) == len(held)
        every = range(len(model.tensors))
        owned = {index for index in every if owned_boxes(model, layout, at, PARAMETER, index)}
        assert set(held) == owned
        holders = {index: model.holders(index, layout) for index in owned}
        assert all(at.replica in holding for holding in holders.values())


@given(LAYOUTS, st.sampled_from(MODELS))
def test_bytes_of_all_workers_are_those_of_all_copies(layout: Layout, model: ModelSpec) -> None:
    counted = Counter[str]()
    for at in layout.coordinates():
        counted.update(worker_bytes(model, layout, at))
    expected = Counter[str]()
    for index, tensor in enumerate(model.tensors):
        copies = _copies_of_a_replica(model, layout, index)
        replicas = layout.expert_replicas if tensor.expert else layout.replicas
        size = tensor.element_bytes or model.parameter_bytes
        expected[PARAMETER] += tensor.elements * size * copies * replicas
        if tensor.role == "trained":
            expected[GRADIENT] += tensor.elements * model.gradient_bytes * copies * replicas
            expected.update(dict.fromkeys(model.optimizer_kinds, tensor.elements * 4 * copies))
    assert counted == expected


def test_swiglu_halves_are_split_each_on_its_own() -> None:
    gate_and_up = TensorSpec("fc1", (8, 3), 0, (4, 4))
    first, second = slabs(gate_and_up, tp=2, tp_rank=1)
    assert first.box == Box(2, 4, 0, 3)
    assert first.local_row == 0
    assert second.box == Box(6, 8, 0, 3)
    assert second.local_row == 2


def test_blocks_of_several_sizes_are_split_each_on_its_own() -> None:
    """As the input projection of a Mamba layer."""
    projection = TensorSpec("in_proj", (14, 3), 0, (8, 4, 2))
    found = [(slab.box.row0, slab.box.row1, slab.local_row) for slab in slabs(projection, 2, 1)]
    assert found == [(4, 8, 0), (10, 12, 4), (13, 14, 6)]


def test_a_tensor_of_any_rank_is_a_matrix_along_the_dimension_that_is_split() -> None:
    kernel = TensorSpec("conv", (3, 8, 5), 1, (6, 2))
    assert (kernel.rows, kernel.cols) == (3, 40)
    assert [slab.box for slab in slabs(kernel, 2, 1)] == [Box(0, 3, 15, 30), Box(0, 3, 35, 40)]
    whole = TensorSpec("conv", (4, 2, 3))
    assert (whole.rows, whole.cols, whole.elements) == (4, 6, 24)


def test_a_layout_that_does_not_divide_is_named() -> None:
    tensors = (TensorSpec("fc1", (10, 3), 0, (6, 4)),)
    model = ModelSpec(
        tensors,
        {"pp1": (((0,),),), "pp4": ()},
        parameter_bytes=4,
        homes={2: (None,)},
        refused={"tp1 pp3 dp1": "3 stages of 4 layers"},
    )
    model.check_layout(Layout(2, 1, 1))
    with pytest.raises(ConfigError, match=r"fc1: dimension 0 is 10, .*\(6, 4\), which tp=4"):
        model.check_layout(Layout(4, 1, 1))
    with pytest.raises(ConfigError, match="3 stages of 4 layers"):
        model.check_layout(Layout(1, 3, 2))
    with pytest.raises(ConfigError, match="pp4 vpp2: the model's spec has pp1, pp4 only"):
        model.check_layout(Layout(1, 4, 1, vpp=2))
    with pytest.raises(ConfigError, match=r"ep=3: the model's spec has ep \[2\] only"):
        model.check_layout(Layout(1, 1, 3, ep=3))


def test_tied_copy_comes_last_on_the_last_stage() -> None:
    model = MODELS[0]
    layout = Layout(1, 2, 1)
    first, last = (model.held_tensors(layout, Coordinate(0, stage, 0)) for stage in range(2))
    assert first[0] == last[-1] == 0
    assert owned_boxes(model, layout, Coordinate(0, 1, 0), PARAMETER, 0)
