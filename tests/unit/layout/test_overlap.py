"""What workers hold of seats, in closed form, against the boxes of each pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.overlap import Overlap
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, TensorSpec
from tests.unit.layout.models import LAYOUTS, MODELS, UNTIED_BF16

EXPERTS = ModelSpec(
    tensors=(
        TensorSpec("router", (4, 16)),
        *(TensorSpec(f"expert{n}", (24, 16), 0, (12, 12), expert=True) for n in range(4)),
        TensorSpec("head", (40, 16), 0, (40,)),
    ),
    stages={"pp1": (((0, 1, 2, 3, 4, 5),),)},
    parameter_bytes=4,
    homes={2: (None, 0, 0, 1, 1, None), 4: (None, 0, 1, 2, 3, None)},
)


def common_bytes(
    model: ModelSpec,
    source: tuple[Layout, Coordinate],
    target: tuple[Layout, Coordinate],
    kinds: tuple[str, ...],
) -> int:
    """Bytes of some kinds that a seat of the source and one of the target have in common."""
    return sum(
        common.elements * model.element_bytes(kind, index)
        for index in range(len(model.tensors))
        for kind in kinds
        for have in owned_boxes(model, *source, kind, index)
        for box in owned_boxes(model, *target, kind, index)
        if (common := have.intersect(box)) is not None
    )


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.sampled_from(MODELS))
def test_parameters_of_every_pair_as_their_boxes_say(
    source: Layout, target: Layout, model: ModelSpec
) -> None:
    overlap = Overlap(model, source, target)
    for at, place in zip(source.coordinates(), overlap.source_places, strict=True):
        held = overlap.parameters(frozenset([place]))
        for to, needed in zip(target.coordinates(), overlap.target_places, strict=True):
            exact = common_bytes(model, (source, at), (target, to), (PARAMETER,))
            assert abs(held[needed] - exact) < 1e-6


@settings(max_examples=8, deadline=None)
@given(LAYOUTS, LAYOUTS)
def test_optimizer_state_of_every_pair_as_its_boxes_say(source: Layout, target: Layout) -> None:
    """But for the copies of what tp does not split, and rows in parts where it splits columns."""
    model = UNTIED_BF16
    state = Overlap(model, source, target).state.toarray()
    exact = np.array(
        [
            [
                common_bytes(model, (source, at), (target, to), model.optimizer_kinds)
                for to in target.coordinates()
            ]
            for at in source.coordinates()
        ]
    )
    copies = sum(tensor.elements for tensor in model.tensors if tensor.tp_dim is None)
    rows = sum(2 * tensor.cols for tensor in model.tensors if tensor.tp_dim == 1)
    assert abs(state - exact).max() <= 12 * (copies + rows)
    if source.tp == target.tp == 1:
        assert (state == exact).all()


def test_a_node_holds_what_its_workers_hold_each_once() -> None:
    source, target = Layout(2, 1, 4, ep=4), Layout(1, 1, 4, ep=2)
    overlap = Overlap(EXPERTS, source, target)
    dense, expert = (4 * 16 + 40 * 16) * 4, 24 * 16 * 4
    ranks = {(at.tp, at.replica): source.rank(at) for at in source.coordinates()}

    def held(*seats: tuple[int, int]) -> list[float]:
        """Of the target's ep ranks 0 and 1."""
        return list(overlap.parameters(frozenset(overlap.source_places[ranks[s]] for s in seats)))

    router = 4 * 16 * 4
    half = router + (dense - router) / 2
    assert held((0, 0)) == [half + expert / 2, half]
    assert held((0, 0), (1, 0)) == [dense + expert, dense]
    assert held((0, 0), (1, 0), (0, 1), (1, 1)) == [dense + 2 * expert, dense]
    assert held((0, 0), (0, 2)) == [half + expert / 2, half + expert / 2]


def test_experts_optimizer_state_is_where_the_experts_are() -> None:
    layout = Layout(1, 1, 4, ep=2)
    state = Overlap(EXPERTS, layout, layout).state.toarray()
    assert (state == np.diag(np.diag(state))).all()
    moved = Overlap(EXPERTS, layout, Layout(1, 1, 4, ep=4)).state.toarray()
    exact = [
        [
            common_bytes(
                EXPERTS,
                (layout, at),
                (Layout(1, 1, 4, ep=4), to),
                EXPERTS.optimizer_kinds,
            )
            for to in Layout(1, 1, 4, ep=4).coordinates()
        ]
        for at in layout.coordinates()
    ]
    assert (moved == np.array(exact)).all()
