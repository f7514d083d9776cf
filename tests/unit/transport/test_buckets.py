"""Cutting and ordering, and that no schedule can deadlock: without any transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import EXP_AVG, PARAMETER, Box, ModelSpec, Move, TransferPlan
from liver_hpc.transport.buckets import (
    Action,
    Bucket,
    Piece,
    Step,
    cut_moves,
    group_steps,
    plan_buckets,
    schedule,
    whole_units,
)
from tests.unit.transport.plans import RandomPlans, plan_of, random_plans

BUDGETS = st.integers(16, 700)
SLOTS = st.integers(1, 4)


def _elements(pieces: Iterable[Piece | Move]) -> Counter[tuple[str, int, int, int]]:
    """How often every element is in the pieces."""
    return Counter(
        (piece.kind, piece.tensor_index, row, col)
        for piece in pieces
        for row in range(piece.box.row0, piece.box.row1)
        for col in range(piece.box.col0, piece.box.col1)
    )


def _four_bytes(_kind: str, _tensor_index: int) -> int:
    return 4


def test_a_bucket_is_filled_before_the_next_is_begun() -> None:
    # 8 rows of 8 floats are 256 bytes: a whole bucket takes 3 rows of 32 bytes, and no part of one.
    buckets = cut_moves([Move(0, EXP_AVG, Box(0, 8, 0, 8), 0, 1)], _four_bytes, 112)
    assert [[piece.box for piece in pieces] for pieces in buckets] == [
        [Box(0, 3, 0, 8)],
        [Box(3, 6, 0, 8)],
        [Box(6, 8, 0, 8)],
    ]
    # Small ones, of 3 rows of 16 bytes: 9 of them, and a row of the tenth.
    moves = [Move(index, EXP_AVG, Box(5, 8, 0, 4), 0, 1) for index in range(10)]
    buckets = cut_moves(moves, _four_bytes, 448)
    assert [[(p.tensor_index, p.box, p.offset_bytes) for p in pieces] for pieces in buckets] == [
        [*((index, Box(5, 8, 0, 4), 48 * index) for index in range(9)), (9, Box(5, 6, 0, 4), 432)],
        [(9, Box(6, 8, 0, 4), 0)],
    ]


def test_a_large_move_shares_no_bucket() -> None:
    shapes = [Box(0, 1, 0, 4), Box(0, 5, 0, 4), Box(0, 1, 0, 4), Box(1, 2, 0, 4)]
    moves = [Move(index, EXP_AVG, box, 0, 1) for index, box in enumerate(shapes)]
    buckets = cut_moves(moves, _four_bytes, 64)
    assert [[(p.tensor_index, p.box) for p in pieces] for pieces in buckets] == [
        [(0, Box(0, 1, 0, 4))],
        [(1, Box(0, 4, 0, 4))],
        [(1, Box(4, 5, 0, 4))],
        [(2, Box(0, 1, 0, 4))],
        [(3, Box(1, 2, 0, 4))],
    ]
    buckets = cut_moves(moves, _four_bytes, 256)
    assert [[p.tensor_index for p in pieces] for pieces in buckets] == [[0], [1], [2, 3]]


def test_a_row_larger_than_a_bucket_is_cut_by_columns() -> None:
    moves = [Move(0, EXP_AVG, Box(0, 2, 3, 13), 0, 1)]
    buckets = cut_moves(moves, _four_bytes, 16)
    assert [pieces[0].box for pieces in buckets] == [
        Box(0, 1, 3, 7),
        Box(0, 1, 7, 11),
        Box(0, 1, 11, 13),
        Box(1, 2, 3, 7),
        Box(1, 2, 7, 11),
        Box(1, 2, 11, 13),
    ]


@given(random_plans(), BUDGETS)
def test_every_element_is_in_exactly_one_bucket_of_at_most_the_given_size(
    case: RandomPlans, bucket_bytes: int
) -> None:
    for plan in case.plans:
        buckets = plan_buckets(plan, case.model.element_bytes, bucket_bytes)
        for mine, moves in (
            ([b for b in buckets if b.sender == plan.worker], plan.sends),
            ([b for b in buckets if b.receiver == plan.worker], plan.receives),
        ):
            pieces = [(p, b.sender, b.receiver) for b in mine for p in b.pieces]
            assert _elements(p for p, _, _ in pieces) == _elements(moves)
            by_pair = Counter((s, r) for p, s, r in pieces for _ in range(p.box.elements))
            assert by_pair == Counter(
                (m.sender, m.receiver) for m in moves for _ in range(m.box.elements)
            )
        for bucket in buckets:
            assert bucket.num_bytes <= bucket_bytes
            _check_inside(bucket, case.model)


def _check_inside(bucket: Bucket, model: ModelSpec) -> None:
    """Pieces lie one behind the other, at offsets that any element type can start at."""
    end = 0
    for piece in bucket.pieces:
        assert piece.offset_bytes % 16 == 0
        assert piece.offset_bytes >= end
        assert piece.num_bytes == piece.box.elements * model.element_bytes(
            piece.kind, piece.tensor_index
        )
        end = piece.offset_bytes + piece.num_bytes
    assert end <= bucket.num_bytes


@given(random_plans(), BUDGETS)
def test_both_ends_cut_alike_and_keep_the_order_of_the_plan(
    case: RandomPlans, bucket_bytes: int
) -> None:
    ends: dict[tuple[int, int], list[list[Bucket]]] = {}
    for plan in case.plans:
        found: dict[tuple[int, int], list[Bucket]] = {}
        buckets = plan_buckets(plan, case.model.element_bytes, bucket_bytes)
        assert buckets == sorted(buckets, key=lambda bucket: bucket.key)
        assert len({bucket.key for bucket in buckets}) == len(buckets)
        for bucket in buckets:
            found.setdefault((bucket.sender, bucket.receiver), []).append(bucket)
        for pair, between in found.items():
            ends.setdefault(pair, []).append(between)
    for between in ends.values():
        assert len(between) == 2
        assert between[0] == between[1]
        order = [(piece.tensor_index, piece.kind) for b in between[0] for piece in b.pieces]
        assert order == sorted(order)


@dataclass
class _Simulated:
    """One worker that goes through its schedule: what it has launched, and what waits."""

    actions: list[Action]
    launched: list[Step] = field(default_factory=list)
    next_action: int = 0
    held: dict[int, Step] = field(default_factory=dict)

    def done(self) -> bool:
        return self.next_action == len(self.actions)


def _needs_slot(in_place: frozenset[tuple[int, int, int]], step: Step) -> bool:
    return any(bucket.key not in in_place for bucket in step)


class _Network:
    """Lock-step workers over a wire that crosses a bucket only when both ends have started it.

    `grouped`: as in NCCL, a worker's step starts only when all its earlier steps are complete.
    """

    def __init__(
        self,
        case: RandomPlans,
        sizes: tuple[int, int, int],
        grouped: bool,
        direct: float,
        rng: Random,
    ) -> None:
        bucket_bytes, slot_bytes, num_slots = sizes
        self.grouped = grouped
        self.staging_bytes = slot_bytes * num_slots
        self.crossed: set[tuple[int, int, int]] = set()
        self.workers = []
        for plan in case.plans:
            buckets = plan_buckets(plan, case.model.element_bytes, bucket_bytes)
            steps = group_steps(buckets, slot_bytes)
            assert all(sum(bucket.num_bytes for bucket in step) <= slot_bytes for step in steps)
            # Each end of a bucket has it in one piece or not; the other end does not know.
            in_place = frozenset(b.key for b in buckets if rng.random() < direct)
            needs = partial(_needs_slot, in_place)
            self.workers.append(_Simulated(list(schedule(steps, num_slots, needs))))

    def _complete(self, step: Step) -> bool:
        return all(bucket.key in self.crossed for bucket in step)

    def _started(self, worker: _Simulated) -> set[tuple[int, int, int]]:
        started = set()
        for step in worker.launched:
            started.update(bucket.key for bucket in step)
            if self.grouped and not self._complete(step):
                break
        return started

    def cross(self) -> None:
        """Everything crosses that can, and what that sets free."""
        before = -1
        while len(self.crossed) > before:
            before = len(self.crossed)
            started = Counter(key for worker in self.workers for key in self._started(worker))
            self.crossed.update(key for key, ends in started.items() if ends == 2)

    def advance(self, worker: _Simulated) -> bool:
        """Does the worker's next action if it can."""
        if worker.done():
            return False
        action = worker.actions[worker.next_action]
        if action.kind == "launch":
            worker.launched.append(action.step)
            if action.slot is not None:
                assert action.slot not in worker.held
                worker.held[action.slot] = action.step
                assert self._held_bytes(worker) <= self.staging_bytes
        elif not self._complete(action.step):
            return False
        elif action.slot is not None:
            assert worker.held.pop(action.slot) == action.step
        worker.next_action += 1
        return True

    @staticmethod
    def _held_bytes(worker: _Simulated) -> int:
        return sum(bucket.num_bytes for step in worker.held.values() for bucket in step)


@given(
    random_plans(),
    st.tuples(BUDGETS, st.integers(1, 5), SLOTS),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.randoms(),
)
def test_no_order_of_events_deadlocks_and_the_budget_holds(
    case: RandomPlans, sizes: tuple[int, int, int], grouped: bool, direct: float, rng: Random
) -> None:
    """Any worker may be held up for as long as another can still do something."""
    bucket_bytes, per_slot, num_slots = sizes
    slot_bytes = whole_units(bucket_bytes) * per_slot
    network = _Network(case, (bucket_bytes, slot_bytes, num_slots), grouped, direct, rng)
    while not all(worker.done() for worker in network.workers):
        network.cross()
        order = list(network.workers)
        rng.shuffle(order)
        assert any(network.advance(worker) for worker in order), "deadlock"
    wanted = {
        bucket.key
        for plan in case.plans
        for bucket in plan_buckets(plan, case.model.element_bytes, bucket_bytes)
    }
    assert network.crossed == wanted


def test_sends_and_receives_of_a_worker_alternate() -> None:
    """A worker that sends the first tensors and receives the last does both at once."""
    sends = [Move(index, EXP_AVG, Box(0, 4, 0, 4), 0, 1) for index in range(4)]
    receives = [Move(index, EXP_AVG, Box(0, 4, 0, 4), 1, 0) for index in range(4, 8)]
    buckets = plan_buckets(plan_of([*sends, *receives], 0), _four_bytes, 64)
    assert [bucket.sender for bucket in buckets] == [1, 0] * 4


def test_a_plan_of_somebody_else_is_refused() -> None:
    move = Move(0, PARAMETER, Box(0, 1, 0, 1), 2, 3)
    for plan in (TransferPlan(1, (move,), (), ()), TransferPlan(1, (), (move,), ())):
        with pytest.raises(PlanError, match="worker 1: this is not mine to move"):
            plan_buckets(plan, _four_bytes, 64)
    within = Move(0, PARAMETER, Box(0, 1, 0, 1), 1, 1)
    with pytest.raises(PlanError, match="not mine"):
        plan_buckets(TransferPlan(1, (within,), (), ()), _four_bytes, 64)


def test_steps_that_need_no_slot_wait_for_none() -> None:
    steps = [(Bucket(position, 0, 1, (), 16),) for position in range(5)]
    actions = schedule(steps, 1, lambda step: step[0].position in (1, 3))
    assert [(action.kind, action.slot, action.step[0].position) for action in actions] == [
        ("launch", None, 0), ("launch", 0, 1), ("launch", None, 2),
        ("finish", None, 0), ("finish", 0, 1), ("launch", 0, 3), ("launch", None, 4),
        ("finish", None, 2), ("finish", 0, 3), ("finish", None, 4),
    ]  # fmt: skip
