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

from liver_hpc.run.records import EvaluationRecord, RunRecords, StepRecord

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
    worlds, layouts = {}, _layouts(records)
    for generation, steps in sorted(by_generation.items()):
        quiet = [step for step in steps if step.phase == ""]
        known = quiet or [step for step in steps if step.phase != "first"]
        median_s = statistics.median(map(took_s, known)) if known else math.nan
        worlds[generation] = GenerationFigures(
            generation=generation,
            layout=layouts.get(generation, ""),
            steps=len(steps),
            median_step_s=median_s,
            median_is_disturbed=not quiet,
            tokens_per_s=_tokens_per_s(known, median_s),
        )
    return worlds


def _tokens_per_s(known: Sequence[StepRecord], median_s: float) -> float:
    """Of steps that differ in their tokens, the median of their rates."""
    if len({step.tokens for step in known}) > 1:
        return statistics.median(ratio(step.tokens, took_s(step)) for step in known)
    return ratio(known[0].tokens, median_s) if known else math.nan


def took_s(step: StepRecord | EvaluationRecord) -> float:
    return step.ended_s - step.started_s


def _layouts(records: RunRecords) -> dict[int, str]:
    """By generation."""
    layouts = {placement.generation: placement.layout for placement in records.placements}
    attempts = records.reconfigurations
    for recovery in records.recoveries:
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


def built_anew(records: RunRecords) -> dict[int, int]:
    """The generations under which the source world of an aborted attempt may have been built anew,
    each with that of the attempt: the next number, unless a recovery or another attempt has it."""
    taken = {attempt.generation for attempt in records.reconfigurations}
    taken |= {recovery.generation for recovery in records.recoveries}
    return {
        attempt.generation + 1: attempt.generation
        for attempt in records.reconfigurations
        if attempt.outcome == ABORTED and attempt.generation + 1 not in taken
    }


class StepTimes:
    """What steps of each world usually take, by how many tokens they have: all have as many, but
    while the global batch grows."""

    def __init__(
        self, steps: Iterable[StepRecord], worlds: Mapping[int, GenerationFigures]
    ) -> None:
        self._worlds = worlds
        self._tokens: dict[int, int] = {}  # of each step, by its number
        by_world: dict[int, _ByTokens] = defaultdict(lambda: defaultdict(list))
        by_layout: dict[str, _ByTokens] = defaultdict(lambda: defaultdict(list))
        for step in steps:
            self._tokens[step.step] = step.tokens
            world = worlds[step.generation]
            if step.phase == "":
                by_layout[world.layout][step.tokens].append(took_s(step))
            if step.phase == "" or (world.median_is_disturbed and step.phase != "first"):
                by_world[step.generation][step.tokens].append(took_s(step))
        self._by_world = {generation: _medians(each) for generation, each in by_world.items()}
        self._by_layout = {layout: _medians(each) for layout, each in by_layout.items()}

    def usual_s(self, generation: int, step: int) -> float:
        """Of global batch `step` in a world: the median of steps as large, else that of steps of
        the size next to it, in proportion; where it has done no step but its first, by the other
        worlds of its layout."""
        known = self._by_world.get(generation)
        if known is None and (world := self._worlds.get(generation)) and world.layout:
            known = self._by_layout.get(world.layout)
        return _scaled(known or {}, self._tokens.get(step))

    def useful_s(self, step: StepRecord) -> float:
        """What a step is worth: the same; where its world has no undisturbed step, by the other
        worlds of its layout."""
        world = self._worlds[step.generation]
        if world.median_is_disturbed and world.layout and world.layout in self._by_layout:
            return _scaled(self._by_layout[world.layout], step.tokens)
        return self.usual_s(step.generation, step.step)


_ByTokens = dict[int, list[float]]


def _medians(times: _ByTokens) -> dict[int, float]:
    return {tokens: statistics.median(each) for tokens, each in times.items()}


def _scaled(medians_s: Mapping[int, float], tokens: int | None) -> float:
    """tokens: None where the step is not known, which is then as large as the largest."""
    if not medians_s:
        return math.nan
    wanted = max(medians_s) if tokens is None else tokens
    nearest = min(medians_s, key=lambda known: (abs(known - wanted), known))
    return medians_s[nearest] * (1.0 if nearest == wanted else ratio(wanted, nearest))


def first_known(*times_s: float) -> float:
    return next(filter(math.isfinite, times_s), math.nan)


def finite_sum(values: Iterable[float]) -> float:
    """Of what is known."""
    return math.fsum(value for value in values if math.isfinite(value))


def known_sum(values: Sequence[float]) -> float:
    """Of what is known; NaN where there are some, and nothing is known of any."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) if known or not values else math.nan


def ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan
