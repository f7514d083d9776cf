from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.snapshots import Refill, partners, precise, snapshot_boxes, snapshot_bytes
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from tests.unit.layout.models import LAYOUTS, MODELS, UNTIED_BF16


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), LAYOUTS)
def test_the_shares_of_all_ranks_are_the_state_each_element_once(
    model: ModelSpec, layout: Layout
) -> None:
    seen: dict[tuple[str, int], np.ndarray] = {}
    for at in layout.coordinates():
        for kind, index, box in snapshot_boxes(model, layout, at):
            tensor = model.tensors[index]
            count = seen.setdefault((kind, index), np.zeros((tensor.rows, tensor.cols), dtype=int))
            count[box.row0 : box.row1, box.col0 : box.col1] += 1
            assert box in {
                part
                for own in owned_boxes(model, layout, at, kind, index)
                if (part := own.intersect(box)) is not None
            }, "a rank's share is of what it holds"
    wanted = set()
    for index, tensor in enumerate(model.tensors):
        trained = tensor.role == "trained"
        kinds = {precise(model), *model.optimizer_kinds} if trained else {PARAMETER}
        wanted |= {(kind, index) for kind in kinds}
    assert set(seen) == wanted
    assert all((count == 1).all() for count in seen.values())


def test_a_share_is_the_smaller_the_more_workers_there_are() -> None:
    sizes = [
        [snapshot_bytes(UNTIED_BF16, layout, at) for at in layout.coordinates()]
        for layout in (Layout(1, 1, 1), Layout(1, 1, 4), Layout(2, 2, 1))
    ]
    assert len({sum(each) for each in sizes}) == 1
    assert max(sizes[1]) <= 0.3 * sizes[0][0]
    assert max(sizes[2]) <= 0.6 * sizes[0][0]


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ((0, 0, 0), (11, 12, 10)),  # one node: the next worker
        ((0, 0, 1), (12, 12, 10)),
        ((0, 1, 0), (11, 10, 11)),
        ((4, 5, 6), (11, 12, 10)),
        ((), (11, 12, 10)),
    ],
)
def test_a_partner_is_on_the_next_node(nodes: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert partners(RankMap(Layout(1, 1, 3), (10, 11, 12), nodes)) == wanted


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.randoms())
def test_a_partner_is_on_another_node_and_nobody_holds_more_than_his_share(
    sizes: list[int], draw: random.Random
) -> None:
    nodes = [number for number, size in enumerate(sizes) for _ in range(size)]
    draw.shuffle(nodes)
    workers = tuple(range(len(nodes)))
    found = partners(RankMap(Layout(1, 1, len(nodes)), workers, tuple(nodes)))
    assert all(nodes[one] != nodes[partner] for one, partner in zip(workers, found, strict=True))
    most = max(Counter(found).values())
    largest = max(sizes)
    assert most == (1 if 2 * largest <= len(nodes) else -(-largest // (len(nodes) - largest)))


def test_a_lone_worker_has_no_partner() -> None:
    assert partners(RankMap(Layout(1, 1, 1), (3,), (0,))) == (None,)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), LAYOUTS, LAYOUTS, st.data())
def test_a_refill_brings_every_seat_its_state_and_both_ends_agree(
    model: ModelSpec, saved: Layout, layout: Layout, data: st.DataObject
) -> None:
    """Whoever holds the snapshots, seated or not, one or several of them."""
    people = [*range(layout.workers + 2)]
    workers = tuple(data.draw(st.permutations(people))[: layout.workers])
    holders = data.draw(
        st.lists(st.sampled_from(people), min_size=saved.workers, max_size=saved.workers)
    )
    target = RankMap(layout, workers)
    refill = Refill(model, saved, holders, target)
    plans = {worker: refill.plan(worker) for worker in people}
    sent = [move for plan in plans.values() for move in plan.sends]
    received = [move for plan in plans.values() for move in plan.receives]
    assert sorted(sent) == sorted(received)
    for at in layout.coordinates():
        worker = target.worker_at(at)
        got: dict[tuple[str, int], list] = {}
        for move in (*plans[worker].receives, *plans[worker].local):
            got.setdefault((move.kind, move.tensor_index), []).append(move.box)
        for index in model.held_tensors(layout, at):
            for kind in model.kinds:
                boxes = owned_boxes(model, layout, at, kind, index)
                parts = got.pop((kind, index), [])
                assert sum(box.elements for box in parts) == sum(box.elements for box in boxes)
                assert all(any(own.intersect(part) == part for own in boxes) for part in parts)
        assert not got


def test_what_a_worker_gives_of_a_snapshot_is_in_it() -> None:
    """Parameters of low precision are cast from the precise ones, which the snapshot has."""
    saved, target = Layout(2, 1, 2), RankMap(Layout(1, 2, 1), (0, 3))
    refill = Refill(UNTIED_BF16, saved, (0, 3, 0, 3), target)
    kept = {
        worker: {
            (kind, index, box)
            for rank, holder in enumerate(refill.holders)
            if holder == worker
            for kind, index, box in snapshot_boxes(UNTIED_BF16, saved, saved.coordinate(rank))
        }
        for worker in (0, 3)
    }
    for worker, boxes in kept.items():
        plan = refill.plan(worker)
        for move in (*plan.sends, *plan.local):
            kind = precise(UNTIED_BF16) if move.kind == PARAMETER else move.kind
            assert any(
                (kind, move.tensor_index) == (k, i) and box.intersect(move.box) == move.box
                for k, i, box in boxes
            )
