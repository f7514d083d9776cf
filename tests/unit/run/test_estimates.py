from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.memory import handoff_bytes, move_bytes, worker_bytes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.run import estimates as module
from liver_hpc.run.estimates import (
    ASSUMED_BOOT_S,
    ASSUMED_BYTES_PER_S,
    ASSUMED_DISK_BYTES_PER_S,
    ASSUMED_PREPARE_S,
    ASSUMED_RELEASE_S,
    ASSUMED_STEP_S,
    BOUNDARY_STEPS,
    REMEMBERED_HANDOFFS,
    HandoffEstimator,
    checkpoint_bytes,
    traffic_of,
)
from liver_hpc.run.records import ReconfigurationRecord
from tests.unit.config.runs import minimal
from tests.unit.layout.models import LAYOUTS, MODELS, TIED, rank_map, state_bytes
from tests.unit.report.rows import reconfiguration

DP2, TP2_DP2 = rank_map(Layout(1, 1, 2)), RankMap(Layout(2, 1, 2), (0, 2, 1, 3))


def estimator(spec: ModelSpec = TIED, **sections: Any) -> HandoffEstimator:
    return HandoffEstimator(minimal(**sections), spec)


def completed(**fields: Any) -> ReconfigurationRecord:
    """A growth from DP2 to TP2_DP2: each part of another length, in seconds 4, 3, 2, 1, 5, 6."""
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
    return reconfiguration(**times | fields)


def model(width: int) -> ModelSpec:
    return gpt_spec(
        GPTConfig(layers=4, hidden=4 * width, ffn_hidden=8 * width, heads=4, vocab_size=8 * width)
    )


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
    assert counted.busiest_bytes == max(move_bytes(spec, moves) for moves in crossing)
    assert counted.busiest_parameter_bytes == max(move_bytes(spec, moves) for moves in parameters)
    assert counted.moved_bytes == handoff_bytes(spec, source, target)[0]


@settings(max_examples=25, deadline=None)
@given(rank_maps(), st.sampled_from(MODELS))
def test_large_worlds_are_bounded_from_above(
    people: tuple[RankMap, RankMap], spec: ModelSpec
) -> None:
    source, target = people
    counted = module._counted(spec, source, target)
    bound = module._bounded(spec, source, target)
    assert bound.moved_bytes >= counted.moved_bytes * 0.9  # but for the buckets' padding
    assert (bound.moved_bytes == 0) == (bound.busiest_bytes == 0)
    assert bound.busiest_parameter_bytes <= bound.busiest_bytes


def test_a_large_world_is_estimated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(*_: object) -> None:
        raise AssertionError("counted move by move")

    monkeypatch.setattr(module, "_counted", too_slow)
    source, target = rank_map(Layout(4, 4, 64)), rank_map(Layout(4, 4, 63))
    bound = traffic_of(TIED, source, target)
    assert 0 < bound.busiest_bytes < state_bytes(TIED)


def test_nothing_moves_where_nobody_changes_seats() -> None:
    layout = Layout(4, 4, 64)
    for where in (rank_map(layout), DP2):
        assert astuple(traffic_of(TIED, where, where)) == (0, 0, 0)
    people = rank_map(layout)
    replaced = RankMap(layout, (5000, *people.workers[1:]))
    moved = traffic_of(TIED, people, replaced).moved_bytes
    seat = worker_bytes(TIED, layout, Coordinate(0, 0, 0))
    assert moved == sum(seat.values()) - seat["gradient"]


def test_a_checkpoint_keeps_no_gradients() -> None:
    layout = Layout(2, 2, 1)
    held = [worker_bytes(TIED, layout, at) for at in layout.coordinates()]
    expected = max(sum(kinds.values()) - kinds["gradient"] for kinds in held)
    assert checkpoint_bytes(TIED, layout) == expected


# ---- before anything was measured


def test_assumptions() -> None:
    found = estimator().estimate(DP2, TP2_DP2, joiners=2)
    traffic = traffic_of(TIED, DP2, TP2_DP2)
    assert found.prepare_s == ASSUMED_BOOT_S + ASSUMED_PREPARE_S
    assert found.boundary_s == BOUNDARY_STEPS * ASSUMED_STEP_S
    expected = ASSUMED_STEP_S + traffic.busiest_bytes / ASSUMED_BYTES_PER_S
    assert found.transfer_s == pytest.approx(expected)
    assert found.release_s == ASSUMED_RELEASE_S
    assert found.bytes_moved == traffic.moved_bytes
    assert found.total_s == sum(astuple(found)[1:-1])


def test_without_joiners_nobody_boots() -> None:
    assert estimator().estimate(TP2_DP2, DP2, joiners=0).prepare_s == ASSUMED_PREPARE_S


def test_no_assumption_is_longer_than_the_deadline() -> None:
    limits = {"boot_s": 2.0, "prepare_s": 3.0, "release_s": 1.0}
    found = estimator(deadlines=limits).estimate(DP2, TP2_DP2, joiners=2)
    assert (found.prepare_s, found.release_s) == (5.0, 1.0)


def test_a_checkpoint_before_any() -> None:
    expected = BOUNDARY_STEPS * 0.5 + checkpoint_bytes(TIED, DP2.layout) / ASSUMED_DISK_BYTES_PER_S
    asked = estimator()
    asked.observe_step(0.5)
    assert asked.checkpoint_s(DP2) == pytest.approx(expected)


# ---- measured


def test_the_same_handoff_again_takes_what_it_took() -> None:
    asked = estimator()
    asked.observe_step(0.5)
    asked.observe(completed())
    found = asked.estimate(DP2, TP2_DP2, joiners=2)
    traffic = traffic_of(TIED, DP2, TP2_DP2)
    assert found.prepare_s == 4 + 3
    assert found.boundary_s == 2
    rate = traffic.busiest_parameter_bytes / 1.0
    assert found.transfer_s == pytest.approx(5 + traffic.busiest_bytes / rate)
    assert found.release_s == 6


def test_the_first_step_of_fewer_workers_is_longer() -> None:
    asked = estimator()
    asked.observe_step(1.0)
    traffic = traffic_of(TIED, TP2_DP2, DP2)
    transfer_s = asked.estimate(TP2_DP2, DP2, joiners=0).transfer_s
    assert transfer_s == pytest.approx(2.0 + traffic.busiest_bytes / ASSUMED_BYTES_PER_S)


def test_the_slowest_of_the_last_handoffs_counts() -> None:
    asked = estimator()
    asked.observe(completed(prepare_ended_s=140.0))
    asked.observe(completed())
    assert asked.estimate(DP2, TP2_DP2, joiners=0).prepare_s == 36
    for _ in range(REMEMBERED_HANDOFFS - 1):
        asked.observe(completed())
    assert asked.estimate(DP2, TP2_DP2, joiners=0).prepare_s == 3


def test_a_notice_that_waited_long_is_no_slow_boot() -> None:
    asked = estimator()
    for notice_s in (100.0, 0.0, 101.0):
        asked.observe(completed(notice_s=notice_s))
    assert asked.estimate(DP2, TP2_DP2, joiners=1).prepare_s == 4 + 3


def test_a_shrink_says_nothing_of_booting() -> None:
    asked = estimator()
    asked.observe(
        completed(
            source="tp2 pp1 dp2", target="tp1 pp1 dp2", source_workers="0,2,1,3",
            target_workers="0,1", notice_s=0.0,
        )
    )  # fmt: skip
    assert asked.estimate(DP2, TP2_DP2, joiners=1).prepare_s == ASSUMED_BOOT_S + 3


def test_an_aborted_handoff_teaches_nothing() -> None:
    asked = estimator()
    asked.observe(completed(outcome="aborted", target_workers=""))
    assert asked.estimate(DP2, TP2_DP2, 2) == estimator().estimate(DP2, TP2_DP2, 2)


def test_times_that_were_never_reached_teach_nothing() -> None:
    asked = estimator()
    asked.observe(reconfiguration())
    asked.observe_step(math.nan)
    asked.observe_checkpoint(1000, 0.0)
    assert asked.estimate(DP2, TP2_DP2, 2) == estimator().estimate(DP2, TP2_DP2, 2)
    assert asked.checkpoint_s(DP2) == estimator().checkpoint_s(DP2)


def test_the_disks_rate() -> None:
    asked = estimator()
    asked.observe_step(1e-9)
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
        asked.observe_step(step_s)
        asked.observe_checkpoint(1000, step_s)
    for fields in records:
        asked.observe(completed(**fields))
    found = astuple(asked.estimate(*people, joiners))
    assert all(math.isfinite(part) and part >= 0 for part in found)
    assert found[0] == pytest.approx(sum(found[1:-1]))
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
        asked.observe(completed(transfer_ended_s=109.0 + transfer_s))
        asked._spec = spec
        found.append((asked.estimate(*people, 1), asked.checkpoint_s(people[0])))
    (less, less_disk_s), (most, most_disk_s) = found
    assert less.bytes_moved <= most.bytes_moved
    assert less.transfer_s <= most.transfer_s
    assert less.total_s <= most.total_s
    assert less_disk_s < most_disk_s
