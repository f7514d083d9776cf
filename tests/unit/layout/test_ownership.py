from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
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


@given(LAYOUTS, st.sampled_from(MODELS))
def test_every_data_parallel_rank_holds_every_parameter_once(
    layout: Layout, model: ModelSpec
) -> None:
    for index, tensor in enumerate(model.tensors):
        copies = len(model.stages_of(index, layout))
        copies *= layout.tp if tensor.tp_dim is None else 1
        for dp in range(layout.dp):
            boxes = [
                box
                for at in layout.coordinates()
                if at.replica == dp
                for box in owned_boxes(model, layout, at, PARAMETER, index)
            ]
            assert (_count(tensor, boxes) == copies).all(), tensor.name


@given(LAYOUTS, st.sampled_from(MODELS))
def test_optimizer_state_is_sharded_over_data_parallel_ranks(
    layout: Layout, model: ModelSpec
) -> None:
    for index, tensor in enumerate(model.tensors):
        copies = len(model.stages_of(index, layout))
        copies *= layout.tp if tensor.tp_dim is None else 1
        boxes = [
            box
            for at in layout.coordinates()
            for box in owned_boxes(model, layout, at, EXP_AVG, index)
        ]
        assert (_count(tensor, boxes) == copies).all(), tensor.name


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
