from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.memory import handoff_bytes, move_bytes, worker_bytes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.run import estimates as module
from liver_hpc.run.estimates import (
    ASSUMED_BOOT_S,
    ASSUMED_BYTES_PER_S,
    ASSUMED_DISK_BYTES_PER_S,
    ASSUMED_PREPARE_S,
    ASSUMED_RELEASE_S,
    ASSUMED_SLOWDOWN,
    ASSUMED_STEP_S,
    BOUNDARY_STEPS,
    REMEMBERED_HANDOFFS,
    HandoffEstimator,
    checkpoint_bytes,
    traffic_of,
)
from liver_hpc.run.records import ReconfigurationRecord
from tests.unit.config.runs import minimal
from tests.unit.layout.models import (
    LAYOUTS,
    MODELS,
    TIED,
    rank_map,
    spec_by_rule,
    state_bytes,
)
from tests.unit.report.rows import reconfiguration

DP2, TP2_DP2 = rank_map(Layout(1, 1, 2)), RankMap(Layout(2, 1, 2), (0, 2, 1, 3))
BATCH = 8
"""Of `minimal`."""


def estimator(spec: ModelSpec = TIED, **sections: Any) -> HandoffEstimator:
    return HandoffEstimator(Budget(minimal(**sections), spec))


def observe(
    asked: HandoffEstimator,
    worlds: tuple[RankMap, RankMap] = (DP2, TP2_DP2),
    **fields: float,
) -> None:
    """A handoff, by default a growth: each part of another length, in seconds 4, 3, 2, 1, 5, 6."""
    times = {
        "notice_s": 100.0,
        "boot_ended_s": 104.0,
        "prepare_started_s": 104.0,
        "prepare_ended_s": 107.0,
        "armed_s": 107.0,
        "source_last_step_ended_s": 109.0,
        "transfer_ended_s": 110.0,
        "committed_s": 115.0,
        "first_step_ended_s": 115.5,
        "released_s": 121.0,
    }
    asked.observe(reconfiguration(**times | fields), *worlds)


def model(width: int) -> ModelSpec:
    sizes = {"hidden": 4 * width, "ffn_hidden": 8 * width, "vocab_size": 8 * width}
    return spec_by_rule(**sizes, seq_length=128)


# ---- bytes


@st.composite
def rank_maps(draw: st.DrawFn) -> tuple[RankMap, RankMap]:
    source, layout = rank_map(draw(LAYOUTS)), draw(LAYOUTS)
    pool = draw(st.permutations(range(source.layout.workers + layout.workers)))
    return source, RankMap(layout, tuple(pool[: layout.workers]))


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_the_busiest_workers_bytes_are_the_plans(
    people: tuple[RankMap, RankMap], spec: ModelSpec
) -> None:
    source, target = people
    counted = traffic_of(spec, source, target)
    plans = [
        transfer_plan(spec, source, target, worker)
        for worker in sorted({*source.workers, *target.workers})
    ]
    crossing = [(*plan.sends, *plan.receives) for plan in plans]
    parameters = [tuple(move for move in moves if move.kind == PARAMETER) for moves in crossing]
    assert counted.all_bytes == max(move_bytes(spec, moves) for moves in crossing)
    assert counted.parameter_bytes == max(move_bytes(spec, moves) for moves in parameters)


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_large_worlds_are_bounded_from_above(
    people: tuple[RankMap, RankMap], spec: ModelSpec
) -> None:
    source, target = people
    moved_bytes = handoff_bytes(spec, source, target)[0]
    bound = module._bounded(spec, source, target)
    share_bytes = moved_bytes / len(source.workers)
    assert bound.all_bytes >= share_bytes * 0.9  # but for the buckets' padding
    assert bound.parameter_bytes <= bound.all_bytes


def test_a_large_world_is_estimated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(*_: object) -> None:
        raise AssertionError("counted move by move")

    monkeypatch.setattr(module, "_counted", too_slow)
    source, target = rank_map(Layout(4, 4, 64)), rank_map(Layout(4, 4, 63))
    bound = traffic_of(TIED, source, target)
    assert 0 < bound.all_bytes < state_bytes(TIED)
    more, fewer = rank_map(Layout(4, 1, 256)), rank_map(Layout(4, 1, 255))
    assert traffic_of(TIED, more, fewer).parameter_bytes == 0, "each keeps its share"
    joined = traffic_of(TIED, fewer, more)
    assert 0 < joined.parameter_bytes < joined.all_bytes


def test_nothing_moves_where_nobody_changes_seats() -> None:
    layout = Layout(4, 4, 64)
    for where in (rank_map(layout), DP2):
        assert astuple(traffic_of(TIED, where, where)) == (0, 0)
    people = rank_map(layout)
    replaced = RankMap(layout, (5000, *people.workers[1:]))
    busiest_bytes = traffic_of(TIED, people, replaced).all_bytes
    seat = worker_bytes(TIED, layout, Coordinate(0, 0, 0))
    kept_bytes = sum(seat.values()) - seat["gradient"]
    assert busiest_bytes == kept_bytes + math.ceil(kept_bytes / len(people.workers))


def test_a_checkpoint_keeps_no_gradients() -> None:
    layout = Layout(2, 2, 1)
    held = [worker_bytes(TIED, layout, at) for at in layout.coordinates()]
    expected = max(sum(kinds.values()) - kinds["gradient"] for kinds in held)
    assert checkpoint_bytes(TIED, layout) == expected


# ---- before anything was measured


def test_assumptions() -> None:
    asked = estimator()
    traffic = traffic_of(TIED, DP2, TP2_DP2)
    assert asked.prepare_s(2) == ASSUMED_BOOT_S + ASSUMED_PREPARE_S
    assert asked.boundary_s() == BOUNDARY_STEPS * ASSUMED_STEP_S
    expected = ASSUMED_STEP_S + traffic.all_bytes / ASSUMED_BYTES_PER_S
    assert asked.transfer_s(DP2, TP2_DP2) == pytest.approx(expected)
    assert asked.release_s() == ASSUMED_RELEASE_S
    total_s = asked.prepare_s(2) + asked.boundary_s() + expected + asked.release_s()
    assert asked.estimate_s(DP2, TP2_DP2, 2) == pytest.approx(total_s)


def test_without_joiners_nobody_boots() -> None:
    assert estimator().prepare_s(0) == ASSUMED_PREPARE_S


def test_no_assumption_is_longer_than_the_deadline() -> None:
    limits = {"boot_s": 2.0, "prepare_s": 3.0, "release_s": 1.0}
    asked = estimator(deadlines=limits)
    assert (asked.prepare_s(2), asked.release_s()) == (5.0, 1.0)


def test_a_checkpoint_before_any() -> None:
    expected = BOUNDARY_STEPS * 0.5 + checkpoint_bytes(TIED, DP2.layout) / ASSUMED_DISK_BYTES_PER_S
    asked = estimator()
    asked.observe_step(0.5, BATCH)
    assert asked.checkpoint_s(DP2) == pytest.approx(expected)


# ---- measured


def test_the_same_handoff_again_takes_what_it_took() -> None:
    asked = estimator()
    asked.observe_step(0.5, BATCH)
    observe(asked)
    traffic = traffic_of(TIED, DP2, TP2_DP2)
    assert asked.prepare_s(2) == 4 + 3
    assert asked.boundary_s() == 2
    rate = traffic.parameter_bytes / 1.0
    assert asked.transfer_s(DP2, TP2_DP2) == pytest.approx(5 + traffic.all_bytes / rate)
    assert asked.release_s() == 6


def test_the_first_step_of_fewer_workers_is_longer() -> None:
    asked = estimator()
    asked.observe_step(1.0, BATCH)
    traffic = traffic_of(TIED, TP2_DP2, DP2)
    assert asked.transfer_s(TP2_DP2, DP2) == pytest.approx(
        2.0 + traffic.all_bytes / ASSUMED_BYTES_PER_S
    )


def test_more_is_allowed_for_than_the_steps_of_a_handoff_took_lately() -> None:
    asked = estimator()
    assert asked.steps_s(DP2, TP2_DP2) == 0.0
    asked.observe_step(40.0, BATCH)
    assert asked.steps_s(DP2, TP2_DP2) == 120.0
    assert asked.steps_s(TP2_DP2, DP2) == 240.0
    observe(asked, committed_s=190.0)  # its first step took 80 s
    assert asked.steps_s(DP2, TP2_DP2) == 240.0


def test_the_slowest_of_the_last_handoffs_counts() -> None:
    asked = estimator()
    observe(asked, prepare_ended_s=140.0)
    observe(asked)
    assert asked.prepare_s(0) == 36
    for _ in range(REMEMBERED_HANDOFFS - 1):
        observe(asked)
    assert asked.prepare_s(0) == 3


def test_a_change_costs_what_stands_and_what_is_slowed_down() -> None:
    """PREPARE and the boot took 7 s from the notice on, beside which steps lost 1.4 s."""
    asked = estimator()
    asked.observe_step(0.5, BATCH)
    before = asked.price(DP2, TP2_DP2, 2)
    assert before.cost_s >= ASSUMED_SLOWDOWN * asked.prepare_s(2)
    for step_s in (0.9, 1.5, 0.4):
        asked.observe_slowed(step_s, BATCH)
    observe(asked)
    price, moved_s = asked.price(DP2, TP2_DP2, 2), asked.transfer_s(DP2, TP2_DP2)
    assert asked.prepare_s(2) == 7
    assert price.ready_s == pytest.approx(7 + asked.boundary_s() + moved_s)
    assert price.cost_s == pytest.approx(moved_s - 0.5 + 1.4)


def test_what_an_aborted_attempt_slowed_down_is_not_the_next_ones() -> None:
    asked, other = estimator(), estimator()
    asked.observe_slowed(1e3, BATCH)
    asked.observe_aborted()
    for one in (asked, other):
        observe(one)
    assert asked.price(DP2, TP2_DP2, 0) == other.price(DP2, TP2_DP2, 0)


def test_a_notice_that_waited_long_is_no_slow_boot_and_slowed_nothing_meanwhile() -> None:
    asked, other = estimator(), estimator()
    for one, notice_s in ((asked, 0.0), (other, 100.0)):
        one.observe_slowed(10.0, BATCH)
        observe(one, notice_s=notice_s, began_s=100.0)
    assert asked.prepare_s(1) == 4 + 3
    assert asked.price(DP2, TP2_DP2, 2) == other.price(DP2, TP2_DP2, 2)


def test_a_shrink_says_nothing_of_booting() -> None:
    asked = estimator()
    observe(asked, (TP2_DP2, DP2), notice_s=0.0)
    assert asked.prepare_s(1) == ASSUMED_BOOT_S + 3


def test_joiners_that_were_kept_say_nothing_of_booting() -> None:
    asked = estimator()
    observe(asked, spares=2)
    assert asked.prepare_s(1) == ASSUMED_BOOT_S + 3
    assert asked.prepare_s(0) == 3


def test_times_that_were_never_reached_teach_nothing() -> None:
    asked = estimator()
    asked.observe(reconfiguration(), DP2, TP2_DP2)
    asked.observe_step(math.nan, BATCH)
    asked.observe_checkpoint(1000, 0.0)
    assert asked.estimate_s(DP2, TP2_DP2, 2) == estimator().estimate_s(DP2, TP2_DP2, 2)
    assert asked.checkpoint_s(DP2) == estimator().checkpoint_s(DP2)


def test_the_disks_rate() -> None:
    asked = estimator()
    asked.observe_step(1e-9, BATCH)
    held = checkpoint_bytes(TIED, DP2.layout)
    asked.observe_checkpoint(held, 7.0)
    assert asked.checkpoint_s(DP2) == pytest.approx(7.0)
    asked.observe_checkpoint(held, 3.0)
    assert asked.checkpoint_s(DP2) == pytest.approx(7.0)


# ---- whatever was measured

TIMES = st.one_of(st.just(math.nan), st.floats(-10.0, 1e5))
KEYS = sorted(name for name in ReconfigurationRecord.__dataclass_fields__ if name.endswith("_s"))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys(KEYS, TIMES)), max_size=6),
    st.lists(TIMES, max_size=4),
    rank_maps(),
    st.integers(0, 4),
)
def test_estimates_are_finite_times(
    records: list[dict[str, float]],
    steps_s: list[float],
    people: tuple[RankMap, RankMap],
    joiners: int,
) -> None:
    asked = estimator()
    for step_s in steps_s:
        asked.observe_step(step_s, BATCH)
        asked.observe_checkpoint(1000, step_s)
    for fields in records:
        observe(asked, **fields)
    parts = (asked.prepare_s(joiners), asked.boundary_s(), asked.release_s())
    found = (asked.estimate_s(*people, joiners), asked.transfer_s(*people), *parts)
    assert all(math.isfinite(part) and part >= 0 for part in found)
    assert math.isfinite(asked.checkpoint_s(people[0]))
    assert asked.checkpoint_s(people[0]) > 0


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.integers(1, 6), st.integers(1, 6), st.floats(1e-3, 1e3))
def test_more_bytes_take_longer(
    people: tuple[RankMap, RankMap], width: int, more: int, transfer_s: float
) -> None:
    """The same rank maps, a wider model; the rate is that of the same measurement."""
    small, large = model(16 * width), model(16 * (width + more))
    found = []
    for spec in (small, large):
        asked = estimator(small)
        observe(asked, transfer_ended_s=109.0 + transfer_s)
        asked._spec = spec
        found.append((asked.transfer_s(*people), asked.checkpoint_s(people[0])))
    (less_s, less_disk_s), (most_s, most_disk_s) = found
    assert less_s <= most_s
    assert less_disk_s < most_disk_s


# ---- evaluations


def test_an_evaluation_that_may_come_before_the_boundary_counts() -> None:
    asked = estimator(eval={"every_steps": 100, "steps": 6})
    asked.observe_step(2.0, BATCH)
    asked.observe_done(50)
    assert asked.boundary_s() == BOUNDARY_STEPS * 2.0
    assert asked.boundary_s(94.0) == BOUNDARY_STEPS * 2.0, "47 steps, and two"
    assumed_s = 6 * 2.0 / 3
    assert asked.boundary_s(96.0) == pytest.approx(BOUNDARY_STEPS * 2.0 + assumed_s)
    asked.observe_done(98)
    assert asked.boundary_s() == pytest.approx(BOUNDARY_STEPS * 2.0 + assumed_s)
    asked.observe_done(100)  # it is under way
    assert asked.boundary_s() == pytest.approx(BOUNDARY_STEPS * 2.0 + assumed_s)
    asked.observe_evaluation(1000.0, 1030.0)
    assert asked.boundary_s() == BOUNDARY_STEPS * 2.0
    asked.observe_done(198)
    assert asked.boundary_s() == pytest.approx(BOUNDARY_STEPS * 2.0 + 30.0)
    assert asked.checkpoint_s(DP2) > 30.0


def test_an_evaluation_in_a_handoff_does_not_make_its_boundary_long() -> None:
    """Of the seconds from 107 to 109, half was an evaluation."""
    asked = estimator(eval={"every_steps": 100, "steps": 6})
    asked.observe_step(0.1, BATCH)
    asked.observe_evaluation(108.0, 109.0)
    observe(asked)
    assert asked.boundary_s() == pytest.approx(1.0)
    asked.observe_evaluation(50.0, 90.0)
    observe(asked)
    assert asked.boundary_s() == pytest.approx(2.0)


# ---- bounded memory

BOUNDED = {"handoff": {"memory": "bounded"}}
WORLDS = DP2, TP2_DP2


def test_a_handoff_in_bounded_memory_writes_a_checkpoint_first() -> None:
    bounded, both = estimator(**BOUNDED), estimator()
    for asked in (bounded, both):
        asked.observe_checkpoint(1000, 10.0)
    written_s = checkpoint_bytes(TIED, DP2.layout) / 100
    assert bounded.written_s(DP2) == written_s > 10.0
    assert bounded.transfer_s(*WORLDS) - both.transfer_s(*WORLDS) == pytest.approx(written_s)
    assert bounded.estimate_s(*WORLDS, 2) - both.estimate_s(*WORLDS, 2) == pytest.approx(written_s)
    prices = bounded.price(*WORLDS, 2), both.price(*WORLDS, 2)
    assert prices[0].cost_s - prices[1].cost_s == pytest.approx(written_s)
    assert prices[0].ready_s - prices[1].ready_s == pytest.approx(written_s)


def test_only_what_does_not_fit_otherwise_is_made_so() -> None:
    most = 10**9
    assert estimator(policy={"memory_bytes": most}).bounded_because(*WORLDS) == ""
    assert estimator(policy={"memory_bytes": 64 * 2**20 + 1}).bounded_because(*WORLDS)
    assert estimator().bounded_because(*WORLDS) == ""


def test_what_the_checkpoint_took_is_not_counted_as_the_networks_slowness() -> None:
    """All state had moved by then, and not the parameters alone."""
    asked = estimator(**BOUNDED)
    asked.observe_checkpoint(1000, 10.0)
    observe(asked, checkpointed_s=109.75)
    first_s, moved_s = 5.0, 0.25
    assert asked.transfer_s(*WORLDS) == pytest.approx(asked.written_s(DP2) + first_s + moved_s)


def test_a_step_of_a_larger_batch_takes_longer_and_is_not_slow() -> None:
    """4 samples in 1 s, so 8 in 2 s: nothing is slow in that."""
    ramp = {"start": 4, "increment": 4, "samples": 40}
    asked = estimator(train={"steps": 100, "global_batch": 8, "rampup": ramp})
    for _ in range(3):
        asked.observe_step(1.0, 4)
    assert asked.usual_step_s() == 1.0
    asked.observe_done(10)
    assert asked.usual_step_s() == 2.0
    assert asked.usual_step_s(4) == 1.0
    slowed = [2.0, 2.5]
    for step_s in slowed:
        asked.observe_slowed(step_s, 8)
    assert asked._slowed_s == 0.5
