"""A state made of plain tensors, without megatron."""

from __future__ import annotations

import pytest
import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape, optimizer_interval
from liver_hpc.layout.tensors import EXP_AVG, MAIN, MOMENTS, PARAMETER, Box, ModelSpec
from liver_hpc.world.state import HeldTensor, WorldState
from tests.unit.layout.models import TIED, UNTIED_BF16


def state_at(
    model: ModelSpec, layout: Layout, at: Coordinate, dtype: torch.dtype = torch.float32
) -> WorldState:
    held = {}
    for index in model.held_tensors(layout, at):
        tensor = model.tensors[index]
        rows, cols = local_shape(tensor, layout.tp)
        shape = (rows, cols) if len(tensor.shape) == 2 else (rows,)
        start, end = optimizer_interval(model, layout, at, index)
        length = end - start
        optimizer = {kind: torch.zeros(length) for kind in (MAIN, *MOMENTS)} if length else {}
        held[index] = HeldTensor(torch.zeros(shape, dtype=dtype), (start, end), optimizer)
    return WorldState(model, layout, at, held)


def numbers(spec: object, generator: torch.Generator) -> torch.Tensor:
    """First values that tell every element apart."""
    return torch.rand(spec.shape, generator=generator)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", [Layout(1, 1, 1), Layout(2, 1, 2), Layout(2, 2, 3)])
def test_initial_values_are_the_same_for_every_layout(layout: Layout) -> None:
    whole = state_at(TIED, Layout(1, 1, 1), Coordinate(0, 0, 0))
    whole.initialize(numbers, seed=5)
    for at in layout.coordinates():
        state = state_at(TIED, layout, at)
        state.initialize(numbers, seed=5)
        for index, box in state.boxes(PARAMETER):
            assert torch.equal(state.view(PARAMETER, index, box), whole.view(PARAMETER, index, box))


def test_bf16_keeps_a_main_copy_of_the_unrounded_values() -> None:
    layout, at = Layout(1, 1, 2), Coordinate(0, 0, 1)
    state = state_at(UNTIED_BF16, layout, at, torch.bfloat16)
    state.initialize(numbers, seed=5)
    boxes = list(state.boxes(MAIN))
    assert boxes
    for index, box in boxes:
        main = state.view(MAIN, index, box)
        assert torch.equal(main.bfloat16(), state.view(PARAMETER, index, box))
    assert any(
        not torch.equal(state.view(MAIN, i, b).bfloat16().float(), state.view(MAIN, i, b))
        for i, b in boxes
    )


def test_a_box_that_is_not_held_is_refused() -> None:
    state = state_at(TIED, Layout(2, 1, 1), Coordinate(0, 0, 0))
    with pytest.raises(PlanError, match=r"tp2 pp1 dp1 at tp 0 .* does not hold parameter"):
        state.view(PARAMETER, 0, TIED.tensors[0].whole)
    half = state_at(TIED, Layout(1, 1, 2), Coordinate(0, 0, 0))
    with pytest.raises(PlanError, match="does not hold exp_avg"):
        half.view(EXP_AVG, 1, Box(0, TIED.tensors[1].rows, 0, 1))


def test_memory_that_is_not_what_the_layout_says_is_refused() -> None:
    layout, at = Layout(1, 1, 1), Coordinate(0, 0, 0)
    good = state_at(TIED, layout, at)._held
    wrong_shape = dict(good)
    wrong_shape[0] = HeldTensor(torch.zeros(3, 3), good[0].interval, good[0].optimizer)
    with pytest.raises(PlanError, match=r"is \[3, 3\], the layout wants \[40, 16\]"):
        WorldState(TIED, layout, at, wrong_shape)
    wrong_interval = dict(good)
    wrong_interval[0] = HeldTensor(good[0].value, (0, 8), good[0].optimizer)
    with pytest.raises(PlanError, match=r"covers \(0, 8\), the layout wants \(0, 640\)"):
        WorldState(TIED, layout, at, wrong_interval)
    missing = {index: held for index, held in good.items() if index != 0}
    with pytest.raises(PlanError, match=r"has no tensor 'embedding\.word_embeddings\.weight'"):
        WorldState(TIED, layout, at, missing)


def test_release_frees_memory_that_others_still_refer_to() -> None:
    state = state_at(TIED, Layout(1, 1, 1), Coordinate(0, 0, 0))
    tensor = state._held[0].value
    state.release()
    assert tensor.untyped_storage().nbytes() == 0


def test_the_memory_of_a_kind_is_that_of_all_its_tensors() -> None:
    layout, at = Layout(1, 1, 2), Coordinate(0, 0, 1)
    state = state_at(UNTIED_BF16, layout, at, torch.bfloat16)
    for kind in (MAIN, *MOMENTS):
        for memory in state.memory(kind):
            memory.fill_(1.0)
        assert all(state.view(kind, index, box).all() for index, box in state.boxes(kind))
