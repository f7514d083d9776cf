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
        copies = len(model.stages_of(tensor, layout.pp))
        copies *= layout.tp if tensor.tp_dim is None else 1
        for dp in range(layout.dp):
            boxes = [
                box
                for at in layout.coordinates()
                if at.dp == dp
                for box in owned_boxes(model, layout, at, PARAMETER, index)
            ]
            assert (_count(tensor, boxes) == copies).all(), tensor.name


@given(LAYOUTS, st.sampled_from(MODELS))
def test_optimizer_state_is_sharded_over_data_parallel_ranks(
    layout: Layout, model: ModelSpec
) -> None:
    for index, tensor in enumerate(model.tensors):
        copies = len(model.stages_of(tensor, layout.pp))
        copies *= layout.tp if tensor.tp_dim is None else 1
        boxes = [
            box
            for at in layout.coordinates()
            for box in owned_boxes(model, layout, at, EXP_AVG, index)
        ]
        assert (_count(tensor, boxes) == copies).all(), tensor.name


def test_swiglu_halves_are_split_each_on_its_own() -> None:
    gate_and_up = TensorSpec("fc1", (8, 3), 0, tp_dim=0, tp_blocks=2)
    first, second = slabs(gate_and_up, tp=2, tp_rank=1)
    assert first.box == Box(2, 4, 0, 3)
    assert first.local_row == 0
    assert second.box == Box(6, 8, 0, 3)
    assert second.local_row == 2


def test_uneven_end_stages() -> None:
    model = ModelSpec(MODELS[0].tensors, 4, 4, first_stage_layers=1, last_stage_layers=1)
    assert model.stage_layers(3) == (1, 2, 1)
    assert model.stage_layers(1) == (4,)
    with pytest.raises(ConfigError, match="pp=2"):
        model.stage_layers(2)


def test_a_layout_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fc1.*dim 0 is 10, which tp=4 x 2 blocks"):
        slabs(TensorSpec("fc1", (10, 3), 0, tp_dim=0, tp_blocks=2), tp=4, tp_rank=0)
    with pytest.raises(ConfigError, match="pp=3"):
        MODELS[0].stage_layers(3)


def test_tied_copy_comes_last_on_the_last_stage() -> None:
    model = MODELS[0]
    last = model.stage_tensors(2, 1)
    assert last[-1] == 0
    assert model.stage_tensors(1, 0)[0] == 0
    assert owned_boxes(model, Layout(1, 2, 1), Coordinate(0, 1, 0), PARAMETER, 0)
