from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import handoff_bytes, worker_bytes
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.placement import place
from liver_hpc.layout.plan import subtract, transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, TransferPlan
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.unit.layout.models import LAYOUTS, MODELS, TIED, rank_map, state_bytes

BOXES = st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5)).map(
    lambda t: Box(t[0], t[0] + t[1], t[2], t[2] + t[3])
)


@st.composite
def rank_maps(draw: st.DrawFn) -> tuple[RankMap, RankMap]:
    """A source rank map, and a target one whose workers are partly the same, shuffled."""
    before, after = draw(LAYOUTS), draw(LAYOUTS)
    pool = list(range(before.workers + after.workers))
    seated = draw(st.permutations(pool))[: after.workers]
    slots = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 100]))  # of a node; 0: nodes are not known

    def on(workers: Iterable[int]) -> tuple[int, ...]:
        return tuple(worker // slots for worker in workers) if slots else ()

    source = range(before.workers)
    return (
        RankMap(before, tuple(source), on(source)),
        RankMap(after, tuple(seated), on(seated)),
    )


def plans(model: ModelSpec, source: RankMap, target: RankMap) -> dict[int, TransferPlan]:
    everybody = sorted({*source.workers, *target.workers})
    return {worker: transfer_plan(model, source, target, worker) for worker in everybody}


@given(BOXES, BOXES)
def test_subtract_leaves_what_the_hole_does_not_cover(box: Box, hole: Box) -> None:
    grid = np.zeros((12, 12), dtype=int)
    for part in subtract(box, hole):
        grid[part.row0 : part.row1, part.col0 : part.col1] += 1
    expected = np.zeros((12, 12), dtype=int)
    expected[box.row0 : box.row1, box.col0 : box.col1] = 1
    expected[hole.row0 : hole.row1, hole.col0 : hole.col1] = 0
    assert (grid == expected).all()


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_both_ends_of_every_move_plan_it(seated: tuple[RankMap, RankMap], model: ModelSpec) -> None:
    by_worker = plans(model, *seated)
    sent = Counter(move for plan in by_worker.values() for move in plan.sends)
    received = Counter(move for plan in by_worker.values() for move in plan.receives)
    assert sent == received
    assert set(sent.values()) <= {1}
    for worker, plan in by_worker.items():
        assert all(move.sender == worker != move.receiver for move in plan.sends)
        assert all(move.receiver == worker != move.sender for move in plan.receives)
        for moves in (plan.sends, plan.receives, plan.local):
            assert list(moves) == sorted(moves)


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_every_element_of_the_target_is_written_exactly_once(
    seated: tuple[RankMap, RankMap], model: ModelSpec
) -> None:
    source, target = seated
    for worker in target.workers:
        plan = transfer_plan(model, source, target, worker)
        seat = target.coordinate_of(worker)
        assert seat is not None
        for index, tensor in enumerate(model.tensors):
            for kind in (PARAMETER, *model.optimizer_kinds):
                grid = np.zeros((tensor.rows, tensor.cols), dtype=int)
                for box in owned_boxes(model, target.layout, seat, kind, index):
                    grid[box.row0 : box.row1, box.col0 : box.col1] += 1
                for move in (*plan.receives, *plan.local):
                    if (move.tensor_index, move.kind) == (index, kind):
                        box = move.box
                        grid[box.row0 : box.row1, box.col0 : box.col1] -= 1
                assert (grid == 0).all(), (tensor.name, kind)


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_nothing_is_sent_that_its_receiver_holds_and_senders_hold_what_they_send(
    seated: tuple[RankMap, RankMap], model: ModelSpec
) -> None:
    source, target = seated

    def held(worker: int, kind: str, index: int) -> tuple[Box, ...]:
        seat = source.coordinate_of(worker)
        return () if seat is None else owned_boxes(model, source.layout, seat, kind, index)

    for worker in target.workers:
        plan = transfer_plan(model, source, target, worker)
        for move in plan.receives:
            own = held(worker, move.kind, move.tensor_index)
            assert all(box.intersect(move.box) is None for box in own)
        for move in (*plan.receives, *plan.local):
            theirs = held(move.sender, move.kind, move.tensor_index)
            assert any(box.intersect(move.box) == move.box for box in theirs)


def test_parameters_come_from_the_own_node_where_it_has_a_whole_copy() -> None:
    """Two nodes of two replicas; each of four joiners takes what it misses from its own node."""
    source = RankMap(Layout(2, 1, 4), tuple(range(8)), (0,) * 4 + (1,) * 4)
    joiners = (20, 21, 30, 31)
    target = RankMap(Layout(2, 1, 6), (*range(8), *joiners), (*source.nodes, 0, 0, 1, 1))
    on = dict(zip(target.workers, target.nodes, strict=True))
    for joiner in joiners:
        receives = transfer_plan(TIED, source, target, joiner).receives
        senders = {move.sender for move in receives if move.kind == PARAMETER}
        assert senders
        assert {on[sender] for sender in senders} == {on[joiner]}
    elsewhere = RankMap(target.layout, target.workers, (*source.nodes, 2, 2, 3, 3))
    near, far = (handoff_bytes(TIED, source, each) for each in (target, elsewhere))
    (moved, _, between_nodes), (moved_far, _, between_nodes_far) = near, far
    assert moved == moved_far
    assert between_nodes < between_nodes_far


def test_moving_to_the_same_seats_sends_nothing() -> None:
    seated = rank_map(Layout(2, 2, 2))
    moved, local, _ = handoff_bytes(TIED, seated, seated)
    assert moved == 0
    assert local == sum(
        sum(worker_bytes(TIED, seated.layout, seat).values())
        - worker_bytes(TIED, seated.layout, seat)["gradient"]
        for seat in seated.layout.coordinates()
    )


def test_one_to_one_moves_the_whole_state() -> None:
    moved, local, _ = handoff_bytes(TIED, rank_map(Layout(1, 1, 1)), RankMap(Layout(1, 1, 1), (9,)))
    assert (moved, local) == (state_bytes(TIED), 0)


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 3))
def test_placement_moves_no_more_than_seats_in_rank_order(
    before: Layout, after: Layout, leaving: int
) -> None:
    source = rank_map(before)
    stay = source.workers[min(leaving, before.workers - 1) :]
    joiners = range(1000, 1000 + max(0, after.workers - len(stay)))
    available = [*stay, *joiners]
    placed = place(TIED, source, after, available)
    plain = RankMap(after, tuple(available[: after.workers]))
    moved, of_plain = (handoff_bytes(TIED, source, each)[0] for each in (placed, plain))
    assert moved <= 1.01 * of_plain  # where a shard ends within a row, the row counts in parts
    assert set(placed.workers) <= set(available)


def test_placement_of_the_same_layout_keeps_everybody_and_seats_the_joiner() -> None:
    source = rank_map(Layout(2, 1, 2))
    placed = place(TIED, source, source.layout, [0, 2, 3, 7])
    assert placed.workers == (0, 7, 2, 3)


def test_placement_is_the_same_for_many_workers_as_seat_by_seat() -> None:
    source = rank_map(Layout(4, 4, 8))
    placed = place(TIED, source, source.layout, [w for w in range(200) if w != 5])
    assert placed.workers[:5] == source.workers[:5]
    assert placed.workers[5] == 128
    assert placed.workers[6:] == source.workers[6:]


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(Exception, match="wants 4 workers, available are"):
        place(TIED, rank_map(Layout(1, 1, 2)), Layout(2, 1, 2), [0, 1])


def test_the_work_does_not_grow_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in boxes looked at, for a worker in the middle of a growing world."""

    def looked_at(dp: int) -> int:
        model = gpt_spec(GPTConfig(layers=4, hidden=64, heads=4, ffn_hidden=96, vocab_size=512))
        source, target = rank_map(Layout(2, 2, dp)), rank_map(Layout(2, 2, dp + 1))
        counted = 0
        intersect = Box.intersect

        def counting(box: Box, other: Box) -> Box | None:
            nonlocal counted
            counted += 1
            return intersect(box, other)

        with monkeypatch.context() as patch:
            patch.setattr(Box, "intersect", counting)
            transfer_plan(model, source, target, source.layout.workers // 4 + 1)
        return counted

    assert looked_at(1024) < 2 * looked_at(16)
