"""What a loss has cost a run, from its records. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from liver_hpc.errors import LiverError
from liver_hpc.run.records import RunRecords, StepRecord


@dataclass(frozen=True)
class Bill:
    """In seconds from when the victim was struck.

    noticed_s: to when the coordinator knew. back_s: to the end of the first step beyond all that
    had been done, without checkpoints that were written meanwhile. steps_redone: before that one,
    by the new world. generation: of that world.
    """

    noticed_s: float
    back_s: float
    steps_redone: int
    generation: int


def bill(records: RunRecords, struck_s: float) -> Bill | None:
    """None as long as no step is done beyond those of the world that was struck."""
    before = [step for step in records.steps if step.ended_s <= struck_s]
    if not before:
        raise LiverError("no step was done before the loss")
    lost = before[-1].generation
    done = 1 + max(step.step for step in records.steps if step.generation == lost)
    again = [step for step in records.steps if step.generation > lost]
    beyond = next((number for number, step in enumerate(again) if step.step >= done), None)
    if beyond is None:
        return None
    until = again[: beyond + 1]
    saves_s = math.fsum(after.started_s - before.ended_s for before, after in pairwise(until))
    return Bill(
        noticed_s=_noticed_s(records, struck_s) - struck_s,
        back_s=until[-1].ended_s - struck_s - saves_s,
        steps_redone=done - until[0].step,
        generation=until[0].generation,
    )


def _noticed_s(records: RunRecords, struck_s: float) -> float:
    """When the loss was known, of a run that recovers, or one that begins again from disk."""
    times_s = [each.noticed_s for each in records.recoveries]
    times_s += [each.at_s for each in records.notices if each.kind == "restart"]
    early_s = [time_s - struck_s for time_s in times_s if time_s < struck_s]
    if early_s or not times_s:
        raise LiverError(f"a loss was noticed {early_s} s after the first one, which is none")
    return min(times_s)


def median_step_s(steps: Sequence[StepRecord]) -> float:
    """Of undisturbed steps. Raises LiverError without any."""
    quiet_s = [step.ended_s - step.started_s for step in steps if step.phase == ""]
    if not quiet_s:
        raise LiverError("wanted undisturbed steps for a median, got none")
    return statistics.median(quiet_s)
