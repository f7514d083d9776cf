"""Worker-hours: they add up, and are laid where they belong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from liver_hpc.report.derive import run_figures
from liver_hpc.report.hours import HoursFigures, WorkerHours
from liver_hpc.run.records import HoldingRecord, NetworkRecord, PlacementRecord, RunRecords
from tests.unit.report.rows import evaluation, step


def held(node: str, from_s: float, to_s: float, slots: int = 2, partition: str = "gpu") -> Any:
    return HoldingRecord(node, "main", partition, slots, from_s, to_s)


def hours_of(records: RunRecords) -> WorkerHours:
    hours = run_figures(records).hours
    for each in (hours.total, *hours.partitions, *hours.nodes):
        parts = each.training_h + each.waiting_h + each.lost_h
        assert parts == pytest.approx(each.held_h)
    return hours


def seconds(each: HoursFigures) -> list[float]:
    """held, training, waiting, lost"""
    hours = (each.held_h, each.training_h, each.waiting_h, each.lost_h)
    return [round(value * 3600, 6) for value in hours]


def test_what_is_not_trained_waits_or_is_lost() -> None:
    """Ten steps of a second; a handoff that took three; ten more on two nodes."""
    steps = [step(n) for n in range(10)]
    steps += [step(10 + n, generation=1, started_s=113.0 + n) for n in range(10)]
    records = RunRecords(
        steps,
        [],
        [],
        {},
        holdings=[held("n1", 90.0, 130.0), held("n2", 105.0, math.nan, partition="preempt")],
        placements=[
            PlacementRecord(0, "tp1 pp1 dp2", "n1", 2),
            PlacementRecord(1, "tp1 pp1 dp3", "n1", 2),
            PlacementRecord(1, "tp1 pp1 dp3", "n2", 1),
        ],
    )
    hours = hours_of(records)
    first, second = hours.nodes
    # n1: from 100 on two workers; the second node is known to be held until 130.
    assert seconds(first) == [80.0, 40.0, 20.0, 20.0]
    assert seconds(second) == [50.0, 10.0, 33.0, 7.0]
    assert seconds(hours.total) == [130.0, 50.0, 53.0, 27.0]
    assert [(each.partition, each.node) for each in hours.partitions] == [
        ("gpu", ""),
        ("preempt", ""),
    ]


def test_steps_that_are_done_again_are_lost_and_evaluations_are_not() -> None:
    steps = [step(n) for n in range(4)]
    steps += [step(2 + n, generation=1, started_s=105.0 + n) for n in range(4)]
    records = RunRecords(
        steps,
        [],
        [],
        {},
        evaluations=[evaluation(step=6, generation=1, started_s=109.0)],
        holdings=[held("n1", 100.0, 110.0, slots=1)],
        placements=[PlacementRecord(0, "tp1 pp1 dp1", "n1", 1)],  # 1 has those of 0
    )
    assert seconds(hours_of(records).total) == [10.0, 6.25, 0.0, 3.75]


def test_a_world_that_hangs_until_the_run_is_killed_loses_its_hour() -> None:
    places = [PlacementRecord(0, "tp1 pp1 dp8", "n1", 8)]
    holdings = [held("n1", 90.0, 3760.0, slots=8)]
    steps = [step(n) for n in range(60)]
    hours = hours_of(RunRecords(steps, [], [], {}, holdings=holdings, placements=places))
    assert seconds(hours.total) == [8 * 3670.0, 8 * 60.0, 8 * 10.0, 8 * 3600.0]


def test_a_node_that_was_not_held_meanwhile_lost_nothing() -> None:
    """The job was queued again, and came back an hour later."""
    steps = [step(n) for n in range(5)]
    steps += [step(5 + n, generation=2, started_s=3700.0 + n) for n in range(5)]
    places = [PlacementRecord(generation, "tp1 pp1 dp2", "n1", 2) for generation in (0, 2)]
    holdings = [held("n1", 100.0, 106.0), held("n1", 3690.0, 3705.0)]
    hours = hours_of(RunRecords(steps, [], [], {}, holdings=holdings, placements=places))
    held_s, training_s, waiting_s, lost_s = seconds(hours.total)
    assert (held_s, waiting_s) == (42.0, 0.0)
    assert (training_s, lost_s) == (20.0, 22.0)  # lost: while it was held, without steps


def test_a_node_that_is_lost_has_trained_what_it_has_trained() -> None:
    """The other one waits for another in its place, which trains from 200 s on."""
    steps = [step(n) for n in range(10)]
    steps += [step(10 + n, generation=2, started_s=200.0 + n) for n in range(10)]
    places = [(0, "n1"), (0, "n2"), (2, "n1"), (2, "n3")]
    records = RunRecords(
        steps,
        [],
        [],
        {},
        holdings=[
            held("n1", 100.0, 210.0, slots=1),
            held("n2", 100.0, 112.0, slots=1),
            held("n3", 190.0, 210.0, slots=1),
        ],
        placements=[PlacementRecord(world, "tp1 pp1 dp2", node, 1) for world, node in places],
    )
    assert [seconds(each) for each in hours_of(records).nodes] == [
        [110.0, 20.0, 0.0, 90.0],
        [12.0, 10.0, 0.0, 2.0],
        [20.0, 10.0, 10.0, 0.0],
    ]


def test_a_seat_without_a_slot_is_not_lost() -> None:
    """Four workers on one machine; in the next start two of them boot until 50, and train."""
    steps = [step(n, started_s=float(n)) for n in range(10)]
    steps += [step(10 + n, generation=2, started_s=50.0 + n) for n in range(10)]
    places = [
        PlacementRecord(0, "tp2 pp1 dp2", "", 4),
        PlacementRecord(2, "tp1 pp1 dp2", "", 2),
    ]
    holdings = [held("", 0.0, 10.0, slots=1) for _ in range(4)]
    holdings += [held("", 20.0, 60.0, slots=1) for _ in range(2)]
    hours = hours_of(RunRecords(steps, [], [], {}, holdings=holdings, placements=places))
    assert seconds(hours.total) == [120.0, 60.0, 0.0, 60.0]


def test_without_holdings_there_are_no_hours() -> None:
    hours = hours_of(RunRecords([step(0), step(1)], [], [], {}))
    assert seconds(hours.total) == [0.0, 0.0, 0.0, 0.0]
    assert hours.nodes == ()


@pytest.mark.parametrize(
    ("config", "transport", "unit"),
    [
        ("", "gloo tcp", "worker-hours"),
        ("", "NET/IB", "GPU-hours"),
        ("    gpus_per_node: 4\n", "gloo tcp", "GPU-hours"),
        ("    gpus_per_node: a100:4\n", "gloo tcp", "GPU-hours"),
        ("    gpus_per_node: 0\n", "gloo tcp", "worker-hours"),
    ],
)
def test_they_are_called_what_they_are(config: str, transport: str, unit: str) -> None:
    networks = [NetworkRecord(0, transport, "n1", "")]
    records = RunRecords([], [], [], {"config": config}, networks=networks)
    assert hours_of(records).unit == unit
