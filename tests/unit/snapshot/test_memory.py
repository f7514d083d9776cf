from __future__ import annotations

import pytest
import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.snapshots import snapshot_boxes, snapshot_bytes
from liver_hpc.layout.tensors import EXP_AVG, MAIN, PARAMETER, ModelSpec
from liver_hpc.snapshot import memory
from liver_hpc.snapshot.memory import Snapshot, SnapshotState, by_kind, share_digests
from liver_hpc.transport.digest import MODULUS
from liver_hpc.world.state import WorldState
from tests.unit.layout.models import TIED, UNTIED_BF16
from tests.unit.snapshot.states import CPU, SCALARS, filled, share_of


@pytest.fixture(params=[memory.CHUNK_BYTES, 600, 40], autouse=True)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes lie in one, or in several; a row of some is longer than a whole one."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", request.param)


MODELS = [(TIED, torch.float32), (UNTIED_BF16, torch.bfloat16)]


@pytest.mark.parametrize(("model", "dtype"), MODELS)
@pytest.mark.parametrize("layout", [Layout(1, 1, 3), Layout(2, 2, 2)])
def test_a_snapshot_holds_the_share_as_it_was(
    model: ModelSpec, dtype: torch.dtype, layout: Layout
) -> None:
    for at in layout.coordinates():
        state = filled(model, layout, at, dtype)
        snapshot = share_of(state)
        assert sum(map(len, snapshot.chunks)) >= snapshot_bytes(model, layout, at)
        whole = {len(chunk) for chunk in snapshot.chunks[:-1] if len(chunk) <= memory.CHUNK_BYTES}
        assert whole <= {memory.CHUNK_BYTES}
        shares = share_digests(state)
        assert snapshot.digests == by_kind(shares)
        assert state.digests(model.kinds, known=shares) == state.digests(model.kinds)
        boxes = [*snapshot_boxes(model, layout, at)]
        wanted = {each: state.view(*each).clone() for each in boxes}
        for each in boxes:
            state.view(*each).zero_()  # training goes on
        for (kind, index, box), values in wanted.items():
            bits = snapshot.find(kind, index, box)
            assert bits is not None
            assert torch.equal(bits.view(values.dtype), values)


@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_a_part_of_what_is_held_is_found(model: ModelSpec, dtype: torch.dtype) -> None:
    layout = Layout(2, 1, 2)
    for at in layout.coordinates():
        state = filled(model, layout, at, dtype)
        snapshot = share_of(state)
        for kind, index, box in snapshot_boxes(model, layout, at):
            inner = box._replace(
                row0=(box.row0 + box.row1) // 2, col1=(box.col0 + box.col1 + 1) // 2
            )
            bits, values = snapshot.find(kind, index, inner), state.view(kind, index, inner)
            assert bits is not None
            assert torch.equal(bits.view(values.dtype), values)


@pytest.mark.parametrize(("model", "dtype"), MODELS)
def test_the_digests_of_all_shares_are_those_of_the_state_in_whatever_layout(
    model: ModelSpec, dtype: torch.dtype
) -> None:
    totals = []
    for layout in (Layout(1, 1, 1), Layout(2, 1, 2), Layout(1, 2, 3)):
        found: dict[str, int] = {}
        for at in layout.coordinates():
            for kind, value in share_of(filled(model, layout, at, dtype)).digests.items():
                found[kind] = (found.get(kind, 0) + value) % MODULUS
        totals.append(found)
    assert totals[0] == totals[1] == totals[2]


def test_a_flipped_byte_shows() -> None:
    snapshot = share_of(filled(TIED, Layout(1, 1, 2), Coordinate(0, 0, 1), torch.float32))
    assert snapshot.digest() == snapshot.digests
    snapshot.chunks[0][3] ^= 1 << 5
    assert snapshot.digest() != snapshot.digests


def test_parameters_of_low_precision_are_cast_from_the_precise_ones() -> None:
    layout = Layout(1, 1, 2)
    states = [filled(UNTIED_BF16, layout, at, torch.bfloat16) for at in layout.coordinates()]
    held = SnapshotState(UNTIED_BF16, map(share_of, states), CPU, target=None)
    seen = 0
    for state in states:
        for index, box in state.boxes(MAIN):
            view = held.view(PARAMETER, index, box)
            assert view.dtype == torch.bfloat16
            assert torch.equal(view, state.view(PARAMETER, index, box))
            assert torch.equal(held.view(EXP_AVG, index, box), state.view(EXP_AVG, index, box))
            seen += 1
    assert seen


def test_a_box_that_no_snapshot_has_is_refused_by_name() -> None:
    state = filled(TIED, Layout(1, 1, 2), Coordinate(0, 0, 0), torch.float32)
    held = SnapshotState(TIED, [share_of(state)], CPU, target=None)
    name = TIED.tensors[0].name
    with pytest.raises(PlanError, match=rf"ranks \[0\] do not hold exp_avg .*{name}"):
        held.view(EXP_AVG, 0, TIED.tensors[0].whole)


def test_what_it_is_told_by() -> None:
    layout = Layout(1, 1, 2)
    told = share_of(filled(TIED, layout, Coordinate(0, 0, 1), torch.float32), generation=4).told()
    assert (told.generation, told.layout, told.rank) == (4, str(layout), 1)
    assert told.scalars == SCALARS
    with pytest.raises(AssertionError, match="nothing was taken"):
        Snapshot(TIED, layout, 0, generation=4).told()


def test_an_untrained_tensor_comes_back_in_its_own_dtype() -> None:
    """Copies within a worker go by values, so the bits have to be taken for what they are."""
    from dataclasses import replace

    buffer = replace(TIED.tensors[-1], role="buffer", element_bytes=8)
    model = replace(TIED, tensors=(*TIED.tensors[:-1], buffer))
    layout, index = Layout(1, 1, 1), len(model.tensors) - 1
    state: WorldState = filled(model, layout, Coordinate(0, 0, 0), torch.float32)
    counts = torch.arange(buffer.elements, dtype=torch.int64).reshape(buffer.shape)
    state._held[index] = replace(state._held[index], value=counts, optimizer={}, interval=(0, 0))
    held = SnapshotState(model, [share_of(state)], CPU, target=state)
    view = held.view(PARAMETER, index, buffer.whole)
    assert view.dtype == torch.int64
    assert torch.equal(view, state.view(PARAMETER, index, buffer.whole))
