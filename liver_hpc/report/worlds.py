"""What each world of a run did. Pure; a figure that cannot be known is NaN.

The median of a generation is that of its undisturbed steps; where it has none, that of all but its
first step, and a flag says so; where it has no other step either, NaN.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from liver_hpc.run.records import (
    EvaluationRecord,
    ReconfigurationRecord,
    RecoveryRecord,
    RunRecords,
    StepRecord,
)

COMPLETED = "completed"
ABORTED = "aborted"


@dataclass(frozen=True)
class GenerationFigures:
    """What one world did. layout is empty where no record names it."""

    generation: int
    layout: str
    steps: int
    median_step_s: float
    median_is_disturbed: bool
    tokens_per_s: float


def worlds_of(records: RunRecords) -> dict[int, GenerationFigures]:
    by_generation: dict[int, list[StepRecord]] = defaultdict(list)
    for step in records.steps:
        by_generation[step.generation].append(step)
    worlds, layouts = {}, _layouts(records.reconfigurations, records.recoveries)
    for generation, steps in sorted(by_generation.items()):
        quiet_s = [took_s(step) for step in steps if step.phase == ""]
        known_s = quiet_s or [took_s(step) for step in steps if step.phase != "first"]
        median_s = statistics.median(known_s) if known_s else math.nan
        worlds[generation] = GenerationFigures(
            generation=generation,
            layout=layouts.get(generation, ""),
            steps=len(steps),
            median_step_s=median_s,
            median_is_disturbed=not quiet_s,
            tokens_per_s=ratio(statistics.median(s.tokens for s in steps), median_s),
        )
    return worlds


def took_s(step: StepRecord | EvaluationRecord) -> float:
    return step.ended_s - step.started_s


def _layouts(
    attempts: Sequence[ReconfigurationRecord], recoveries: Sequence[RecoveryRecord]
) -> dict[int, str]:
    """By generation."""
    layouts: dict[int, str] = {}
    for recovery in recoveries:
        layouts.setdefault(recovery.source_generation, recovery.source)
        layouts.setdefault(recovery.generation, recovery.target)
    for attempt in attempts:
        layouts.setdefault(attempt.source_generation, attempt.source)
        if attempt.outcome == COMPLETED:
            layouts.setdefault(attempt.generation, attempt.target)
    for attempt in attempts:
        # An aborted attempt may leave the source world to be built anew, under the next number.
        if attempt.outcome == ABORTED:
            layouts.setdefault(attempt.generation + 1, attempt.source)
    return layouts


def useful_step_s(
    steps: Iterable[StepRecord], worlds: Mapping[int, GenerationFigures]
) -> dict[int, float]:
    """What a step of each world is worth: its median; where that has none, that of its layout's
    other worlds."""
    quiet_s: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        if step.phase == "":
            quiet_s[worlds[step.generation].layout].append(took_s(step))
    useful_s = {generation: world.median_step_s for generation, world in worlds.items()}
    for generation, world in worlds.items():
        if world.median_is_disturbed and world.layout and quiet_s[world.layout]:
            useful_s[generation] = statistics.median(quiet_s[world.layout])
    return useful_s


def finite_sum(values: Iterable[float]) -> float:
    """Of what is known."""
    return math.fsum(value for value in values if math.isfinite(value))


def known_sum(values: Sequence[float]) -> float:
    """Of what is known; NaN where there are some, and nothing is known of any."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) if known or not values else math.nan


def ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan
