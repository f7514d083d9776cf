"""What the drawings are made of, from a run's records: pure, in seconds since the run's start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from liver_hpc.report.derive import GenerationFigures, ReconfigurationFigures, RunFigures
from liver_hpc.report.wording import layout_text, number_text
from liver_hpc.run.records import RunRecords, StepRecord

POINTS = 700
"""More steps than this are drawn by the extremes of neighbours."""


@dataclass(frozen=True)
class StepPoint:
    """One step. began_s: the end of the step before it, so that a pause counts as this one's.
    loss: NaN where it is not finite. is_finite: of the loss and the gradient norm."""

    step: int
    generation: int
    began_s: float
    ended_s: float
    loss: float
    is_finite: bool
    tokens_per_s: float


@dataclass(frozen=True)
class Handoff:
    """One attempt.

    spans_s: its phases beside training and at the boundary, each with start and end; one that was
    not reached is left out. at_s: where it is marked.
    """

    figures: ReconfigurationFigures
    at_s: float
    spans_s: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        """`2: tp2 dp2 to pp2 dp2, completed, lost 0.120 s`."""
        record = self.figures
        ends = f"{layout_text(record.source)} to {layout_text(record.target)}"
        lost = number_text(record.lost_s)
        return f"{record.generation}: {ends}, {record.outcome}, lost {lost} s"


@dataclass(frozen=True)
class Story:
    """A run, ready to be drawn. start_s: the epoch time that all others are counted from."""

    start_s: float
    end_s: float
    points: tuple[StepPoint, ...]
    worlds: tuple[tuple[GenerationFigures, float, float], ...]
    handoffs: tuple[Handoff, ...]


def story(records: RunRecords, figures: RunFigures) -> Story:
    """All of a run but its notices, in its own time."""
    start_s = _earliest(records)
    points = tuple(_points(records.steps, start_s))
    handoffs = tuple(_handoff(each, start_s) for each in figures.reconfigurations)
    ends_s = [point.ended_s for point in points]
    ends_s += [end_s for handoff in handoffs for _, _, end_s in handoff.spans_s]
    began_s = {point.generation: point.began_s for point in reversed(points)}
    ended_s = {point.generation: point.ended_s for point in points}
    worlds = [(w, began_s[w.generation], ended_s[w.generation]) for w in figures.generations]
    end_s = max(filter(math.isfinite, ends_s), default=1.0)
    return Story(start_s, max(end_s, 1e-3), points, tuple(worlds), handoffs)


def thinned(points: Sequence[StepPoint], value: Callable[[StepPoint], float]) -> list[StepPoint]:
    """All points, or the least and the greatest of each group of neighbours, in their order; of a
    group without a finite value its first, so that a line has a gap there."""
    if len(points) <= POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / POINTS)
    kept = []
    for first in range(0, len(points), size):
        group = [p for p in points[first : first + size] if math.isfinite(value(p))]
        group = group or [points[first]]
        extremes = {min(group, key=value), max(group, key=value)}
        kept += sorted(extremes, key=lambda point: point.ended_s)
    return kept


def not_finite(points: Sequence[StepPoint]) -> list[tuple[StepPoint, StepPoint]]:
    """The first and the last of neighbours whose loss or gradient norm is not finite."""
    groups = groupby(points, key=lambda point: point.is_finite)
    ends = ([*group] for is_finite, group in groups if not is_finite)
    return [(group[0], group[-1]) for group in ends]


def _earliest(records: RunRecords) -> float:
    times_s = [step.started_s for step in records.steps]
    if not times_s:
        times_s = [record.notice_s for record in records.reconfigurations]
        times_s += [notice.at_s for notice in records.notices]
    return min(filter(math.isfinite, times_s), default=0.0)


def _points(steps: Sequence[StepRecord], start_s: float) -> list[StepPoint]:
    points: list[StepPoint] = []
    previous: StepRecord | None = None
    for step in steps:
        goes_on = previous is not None and step.step == previous.step + 1
        began_s = previous.ended_s if previous is not None and goes_on else step.started_s
        took_s = step.ended_s - began_s
        points.append(
            StepPoint(
                step=step.step,
                generation=step.generation,
                began_s=began_s - start_s,
                ended_s=step.ended_s - start_s,
                loss=step.loss if math.isfinite(step.loss) else math.nan,
                is_finite=step.is_finite,
                tokens_per_s=step.tokens / took_s if took_s > 0 else math.nan,
            )
        )
        previous = step
    return points


def _handoff(record: ReconfigurationFigures, start_s: float) -> Handoff:
    boundary_s = record.source_last_step_ended_s
    # PREPARE ends with the wait for the boundary, as far as the attempt has come.
    prepared_s = _known(boundary_s, record.armed_s, record.prepare_ended_s)
    edges = (
        ("boot", record.boot_ended_s - record.phases.boot_s, record.boot_ended_s),
        ("prepare", record.prepare_started_s, prepared_s),
        ("crossing", boundary_s, record.first_step_ended_s),
        ("release", record.first_step_ended_s, record.released_s),
    )
    spans_s = tuple(
        (name, begin_s - start_s, end_s - start_s)
        for name, begin_s, end_s in edges
        if end_s >= begin_s  # false where either is NaN
    )
    at_s = _known(boundary_s, record.prepare_started_s, record.notice_s, start_s)
    return Handoff(record, at_s - start_s, spans_s)


def _known(*times_s: float) -> float:
    """The first that is."""
    return next(filter(math.isfinite, times_s), math.nan)
