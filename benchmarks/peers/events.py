"""What a change of workers cost, from the steps that a job has written down. Pure.

Every process appends one line a step to a file of its own; `merged` makes steps of them.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from liver_hpc.errors import LiverError

JOIN, LEAVE, KILL = "join", "leave", "kill"


@dataclass(frozen=True)
class Step:
    """A step that counted. world: a number that all its workers agree on and no other world has;
    workers: how many contributed; times are epoch seconds."""

    step: int
    world: int
    workers: int
    started_s: float
    ended_s: float
    loss: float

    def line(self) -> str:
        """As a process writes it."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Step:
        """The inverse of `line`. Raises ValueError."""
        return cls(**json.loads(line))


@dataclass(frozen=True)
class Change:
    """What was done to a job, and when: workers before and after."""

    event: str
    source: int
    target: int
    noticed_s: float


@dataclass(frozen=True)
class Cost:
    """lost_s: from the end of the last step of the old world that was kept to the end of the
    first of the new, less a median step. slowdown_s: what the old world's steps took longer from
    the notice on. steps_again: done by the old world and done once more.
    steps_between: done by the old workers' number in the new world already, while newcomers only
    looked on; a median step of the old world each is no loss."""

    lost_s: float
    slowdown_s: float
    notice_to_first_step_s: float
    steps_again: int
    steps_between: int
    median_step_s: float


def merged(lines: Iterable[Step]) -> list[Step]:
    """One step of all lines of the same step and world: it ends when the last worker ends it, and
    its loss is the mean of theirs."""
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for line in lines:
        found[line.world, line.step].append(line)
    steps = [
        Step(
            step,
            world,
            max(part.workers for part in parts),
            min(part.started_s for part in parts),
            max(part.ended_s for part in parts),
            statistics.fmean(part.loss for part in parts),
        )
        for (world, step), parts in found.items()
    ]
    return sorted(steps, key=lambda step: step.ended_s)


def settled(steps: Sequence[Step], change: Change) -> list[Step]:
    """Steps by all the target's workers in its world; of a world that began after the notice."""
    old = {step.world for step in steps if step.ended_s <= change.noticed_s}
    return [s for s in steps if s.world not in old and s.workers == change.target]


def cost_of(steps: Sequence[Step], change: Change) -> Cost:
    """Raises LiverError where too few steps are there to tell."""
    after = settled(steps, change)
    if len(after) < 3:
        raise LiverError(f"{change.event}: {len(after)} steps of the new world, wanted 3")
    first = after[0]
    begun = min(step.step for step in steps if step.world == first.world)
    old = [s for s in steps if s.ended_s < first.ended_s and s.world != first.world]
    if not old:
        raise LiverError(f"{change.event}: no step of the old world")
    last_world = old[-1].world
    kept = [step for step in old if step.step < begun]
    if not kept:
        raise LiverError(f"{change.event}: nothing of the old world was kept")
    between = [s for s in steps if s.world == first.world and s.ended_s < first.ended_s]
    old_median_s = statistics.median(
        step.ended_s - step.started_s
        for step in old
        if step.world == last_world and step.ended_s <= change.noticed_s
    )
    beside = [step for step in kept if step.ended_s > change.noticed_s]
    begun_s = next((s.ended_s for s in reversed(kept) if s not in beside), kept[0].started_s)
    median_s = statistics.median(step.ended_s - step.started_s for step in after[1:])
    return Cost(
        lost_s=first.ended_s - kept[-1].ended_s - median_s - len(between) * old_median_s,
        slowdown_s=kept[-1].ended_s - begun_s - len(beside) * old_median_s if beside else 0.0,
        notice_to_first_step_s=first.ended_s - change.noticed_s,
        steps_again=sum(step.step >= begun for step in old),
        steps_between=len(between),
        median_step_s=median_s,
    )
