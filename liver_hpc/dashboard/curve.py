"""The steps of a run as a curve of few points, however many there are: each point stands for as
many neighbours as any other, and twice as many whenever there would be too many points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from liver_hpc.run.records import StepRecord

MOST_POINTS = 1200


@dataclass
class Point:
    """Neighbouring steps. losses: the first and the second of their extremes, in the order in which
    they were; NaN where none is finite. busy_s: how long they took. began_s: the end of the step
    before, so that a pause counts as this one's. version: when it was changed last."""

    began_s: float
    ended_s: float
    step: int
    generation: int
    losses: tuple[float, float]
    is_finite: bool
    tokens: int
    busy_s: float
    version: int

    def take(self, later: Point) -> None:
        values = [loss for loss in (*self.losses, *later.losses) if math.isfinite(loss)]
        if values:
            low, high = values.index(min(values)), values.index(max(values))
            self.losses = values[min(low, high)], values[max(low, high)]
        self.ended_s, self.step, self.generation = later.ended_s, later.step, later.generation
        self.is_finite = self.is_finite and later.is_finite
        self.tokens += later.tokens
        self.busy_s += later.busy_s
        self.version = later.version


class Curve:
    """Takes steps in the order of their ends; never forgets an extreme of the loss."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        """most_points: an even number."""
        self.points: list[Point] = []
        self._most_points = most_points
        self._steps_a_point = 1
        self._in_last = 0
        self._last: StepRecord | None = None
        self._evaluated_s = -math.inf

    def started(self) -> None:
        """The next step is the first of another start: the time between is nobody's."""
        self._last = None

    def evaluated(self, ended_s: float) -> None:
        """The next step begins with the end of an evaluation before it."""
        self._evaluated_s = ended_s

    def add(self, step: StepRecord, version: int) -> None:
        """version: higher than all before, or the same."""
        last, self._last = self._last, step
        follows = last is not None and step.step == last.step + 1
        began_s = last.ended_s if last is not None and follows else step.started_s
        began_s = max(began_s, self._evaluated_s) if self._evaluated_s < step.ended_s else began_s
        point = Point(
            began_s,
            step.ended_s,
            step.step,
            step.generation,
            (step.loss, step.loss) if math.isfinite(step.loss) else (math.nan, math.nan),
            step.is_finite,
            step.tokens,
            max(0.0, step.ended_s - began_s),
            version,
        )
        if self.points and self._in_last < self._steps_a_point:
            self.points[-1].take(point)
            self._in_last += 1
            return
        if len(self.points) == self._most_points:
            self._halve(version)
        self.points.append(point)
        self._in_last = 1

    def _halve(self, version: int) -> None:
        """All points are full."""
        for first, second in zip(self.points[::2], self.points[1::2], strict=True):
            first.take(second)
            first.version = version
        del self.points[1::2]
        self._steps_a_point *= 2

    def since(self, version: int) -> tuple[int, Sequence[Point]]:
        """The points that were changed after a version, all of which are at the end, and the index
        of the first of them."""
        first = bisect_right(self.points, version, key=attrgetter("version"))
        return first, self.points[first:]
