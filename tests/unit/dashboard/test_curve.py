"""A run's curve: few points however many steps, with every extreme, every token and every gap."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from liver_hpc.dashboard.curve import Curve
from liver_hpc.run.records import StepRecord
from tests.unit.report.rows import step


def curve_of(steps: list[StepRecord], most_points: int = 8) -> Curve:
    curve = Curve(most_points)
    for version, each in enumerate(steps, start=1):
        curve.add(each, version)
    return curve


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 100, 1000])
def test_nothing_is_lost_however_many_steps_there_are(count: int) -> None:
    draw = random.Random(count)
    steps = [step(n, loss=draw.uniform(1, 5)) for n in range(count)]
    points = curve_of(steps).points
    losses = [each.loss for each in steps]
    assert len(points) <= 8
    assert points[0].began_s == steps[0].started_s
    assert points[-1].ended_s == steps[-1].ended_s
    assert points[-1].step == count - 1
    assert sum(point.tokens for point in points) == sum(each.tokens for each in steps)
    assert sum(point.busy_s for point in points) == pytest.approx(count)
    assert min(loss for point in points for loss in point.losses) == min(losses)
    assert max(loss for point in points for loss in point.losses) == max(losses)


def test_a_point_has_its_extremes_in_the_order_in_which_they_were() -> None:
    falling = [step(n, loss=9.0 - n) for n in range(8)]
    rising = [step(n, loss=1.0 + n) for n in range(8)]
    assert curve_of([*falling, step(8)], 8).points[0].losses == (9.0, 8.0)
    assert curve_of([*rising, step(8)], 8).points[0].losses == (1.0, 2.0)


def test_a_pause_counts_as_the_step_that_follows_it() -> None:
    points = curve_of([step(0), step(1, started_s=105.0)]).points
    assert (points[1].began_s, points[1].busy_s) == (101.0, 5.0)


def test_a_step_that_is_done_again_begins_by_itself() -> None:
    """As after a restart: the time between is nobody's."""
    points = curve_of([step(0), step(1), step(0, started_s=200.0)]).points
    assert (points[2].began_s, points[2].busy_s) == (200.0, 1.0)


def test_a_step_begins_with_the_end_of_the_evaluation_before_it() -> None:
    curve = curve_of([step(0)])
    curve.evaluated(101.5)
    curve.add(step(1, started_s=101.5), 2)
    assert (curve.points[1].began_s, curve.points[1].busy_s) == (101.5, 1.0)


@pytest.mark.parametrize("figure", [{"loss": math.nan}, {"grad_norm": math.inf}])
def test_what_is_not_finite_is_marked_and_stretches_nothing(figure: dict[str, Any]) -> None:
    points = curve_of([*(step(n, loss=2.0) for n in range(9)), step(9, **{"loss": 2.0} | figure)])
    last = points.points[-1]
    assert not last.is_finite
    assert last.losses == (2.0, 2.0)
    alone = curve_of([step(0, loss=math.nan)]).points[0]
    assert all(map(math.isnan, alone.losses))


def test_a_browser_that_is_told_what_has_changed_has_the_whole_curve() -> None:
    """Whenever it asks, at every length."""
    draw, curve, known, shown = random.Random(1), Curve(8), 0, list[Any]()
    for version in range(1, 200):
        curve.add(step(version), version)
        if draw.random() < 0.3:
            first, points = curve.since(known)
            assert first <= len(shown)
            shown[first:] = [vars(point).copy() for point in points]
            known = version
            assert shown == [vars(point) for point in curve.points]
    assert curve.since(known)[1] == curve.points[curve.since(known)[0] :]
