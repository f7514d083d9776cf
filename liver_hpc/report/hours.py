"""Worker-hours: what of the run's nodes was held, trained with, waited, and was lost. Pure.

One slot of a node that is held for an hour is a worker-hour; where workers have a GPU each, a
GPU-hour. A worker has a seat from the first step of its world to the first step of the next one, in
the last one to the end; what of that no step or evaluation is worth, each counted once at the
median of its world, is lost: handoffs, recoveries, restarts, steps that were done again, and steps
that were slow. Time in which the node was not held is neither. A slot without a seat waits: it
boots, stands by, or is idle.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from liver_hpc.report.worlds import finite_sum, took_s
from liver_hpc.run.records import HoldingRecord, PlacementRecord, RunRecords

HOUR_S = 3600.0
_WITH_GPUS = re.compile(r"^\s*gpus_per_node: (?:\S+:)?[1-9]", re.MULTILINE)


@dataclass(frozen=True)
class HoursFigures:
    """Of one node in one partition, or of all: held_h is the sum of the other three."""

    node: str
    partition: str
    held_h: float
    training_h: float
    waiting_h: float
    lost_h: float


@dataclass(frozen=True)
class WorkerHours:
    """Of the run: of all nodes, by partition, and by node. unit: "GPU-hours" or "worker-hours"."""

    unit: str
    total: HoursFigures
    partitions: tuple[HoursFigures, ...]
    nodes: tuple[HoursFigures, ...]


class _Seated(NamedTuple):
    """A world's time. seats: its workers by node. worth_s: of its steps and evaluations."""

    from_s: float
    until_s: float
    seats: Mapping[str, int]
    worth_s: float


class _Slots(NamedTuple):
    """How many of a node are held at once, from one change of their number to the next."""

    from_s: float
    until_s: float
    slots: int


def worker_hours(records: RunRecords, useful_s: Mapping[int, float]) -> WorkerHours:
    """useful_s: what each step is worth, by its number. What is held still, is until the last time
    that the records know."""
    by_node: dict[tuple[str, str], list[HoldingRecord]] = defaultdict(list)
    by_name: dict[str, list[HoldingRecord]] = defaultdict(list)
    for holding in records.holdings:
        by_node[holding.partition or holding.allocation, holding.node].append(holding)
        by_name[holding.node].append(holding)
    until_s = _until_s(records)
    worlds = [*_seated(records, useful_s)]
    nodes = []
    for (partition, node), holdings in sorted(by_node.items()):
        held_s = sum(
            each.slots * (_or(each.returned_s, until_s) - each.granted_s) for each in holdings
        )
        spans, all_spans = held_spans(holdings), held_spans(by_name[node])
        slots = _slots(holdings)
        seated_s = trained_s = 0.0
        for world in worlds:
            seats = world.seats.get(node, 0)
            there_s = overlap_s(spans, world.from_s, world.until_s)
            if there_s > 0 and seats:
                node_s = overlap_s(all_spans, world.from_s, world.until_s)
                in_slots_s = _in_slots_s(slots, world, seats)
                seated_s += in_slots_s
                trained_s += min(in_slots_s, there_s * seats * min(1.0, world.worth_s / node_s))
        nodes.append(_figures(node, partition, held_s, seated_s, trained_s))
    names = sorted({each.partition for each in nodes})
    partitions = [_added([n for n in nodes if n.partition == name], name) for name in names]
    return WorkerHours(unit_of(records), _added(nodes, ""), tuple(partitions), tuple(nodes))


def held_spans(holdings: Iterable[HoldingRecord]) -> list[tuple[float, float]]:
    """When any of these was open, without overlaps; what is held still has no end."""
    return in_any((each.granted_s, _or(each.returned_s, math.inf)) for each in holdings)


def in_any(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time, in order and without overlaps."""
    merged: list[tuple[float, float]] = []
    for from_s, to_s in sorted(spans):
        if merged and from_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], to_s)
        else:
            merged.append((from_s, to_s))
    return merged


def overlap_s(spans: Iterable[tuple[float, float]], from_s: float, until_s: float) -> float:
    """How much of the time between the two is in `spans`, which do not overlap."""
    return sum(max(0.0, min(to_s, until_s) - max(at_s, from_s)) for at_s, to_s in spans)


def _slots(holdings: Iterable[HoldingRecord]) -> list[_Slots]:
    """In order."""
    changes: Counter[float] = Counter()
    for each in holdings:
        changes[each.granted_s] += each.slots
        changes[_or(each.returned_s, math.inf)] -= each.slots
    times = sorted(changes)
    held = accumulate(changes[at_s] for at_s in times)
    return [_Slots(*ends, slots) for ends, slots in zip(pairwise(times), held, strict=False)]


def _in_slots_s(slots: Sequence[_Slots], world: _Seated, seats: int) -> float:
    """Worker-seconds of a world on a node. Once a world is lost, fewer slots than it had seats may
    be held until the next one trains."""
    first = max(0, bisect_right(slots, world.from_s, key=attrgetter("from_s")) - 1)
    behind = bisect_left(slots, world.until_s, key=attrgetter("from_s"))
    return sum(
        overlap_s([each[:2]], world.from_s, world.until_s) * min(each.slots, seats)
        for each in slots[first:behind]
    )


def unit_of(records: RunRecords) -> str:
    """What a worker-hour is called."""
    nccl = any(not each.transport.startswith("gloo") for each in records.networks)
    asked = _WITH_GPUS.search(records.attributes.get("config", "")) is not None
    return "GPU-hours" if nccl or asked else "worker-hours"


def _figures(
    node: str, partition: str, held_s: float, seated_s: float, trained_s: float
) -> HoursFigures:
    held_s = max(held_s, seated_s)  # a seat may outlive the notice of its node's end
    values = (held_s, trained_s, held_s - seated_s, seated_s - trained_s)
    return HoursFigures(node, partition, *(value / HOUR_S for value in values))


def _added(nodes: Sequence[HoursFigures], partition: str) -> HoursFigures:
    names = ("held_h", "training_h", "waiting_h", "lost_h")
    sums = {name: sum(getattr(each, name) for each in nodes) for name in names}
    return HoursFigures("", partition, **sums)


def _seated(records: RunRecords, useful_s: Mapping[int, float]) -> Iterator[_Seated]:
    """Worlds that have done a step, in order."""
    begun_s: dict[int, float] = {}
    for step in records.steps:
        begun_s.setdefault(step.generation, step.started_s)
    worth_s: dict[int, float] = defaultdict(float)
    for step in {step.step: step for step in records.steps}.values():
        worth_s[step.generation] += finite_sum([useful_s[step.step]])
    for evaluation in {each.step: each for each in records.evaluations}.values():
        worth_s[evaluation.generation] += took_s(evaluation)
    seats = _seats(begun_s, records.placements)
    order = [*begun_s.items(), (-1, _until_s(records))]
    for (generation, from_s), (_, until_s) in pairwise(order):
        yield _Seated(from_s, until_s, seats[generation], worth_s[generation])


def _seats(
    generations: Iterable[int], placements: Iterable[PlacementRecord]
) -> dict[int, dict[str, int]]:
    """Workers of each world by node. A world that was built anew after an abort has those of the
    one before it."""
    known: dict[int, dict[str, int]] = defaultdict(dict)
    for row in placements:
        known[row.generation][row.node] = row.workers
    found, last = {}, dict[str, int]()
    for generation in generations:
        last = found[generation] = known.get(generation, last)
    return found


def _until_s(records: RunRecords) -> float:
    """The last time that the records know."""
    known = [each.ended_s for each in records.steps[-1:]]
    known += [each.ended_s for each in records.evaluations[-1:]]
    for holding in records.holdings:
        known += [holding.granted_s, _or(holding.returned_s, 0.0)]
    return max(known, default=0.0)


def _or(time_s: float, else_s: float) -> float:
    return time_s if time_s == time_s else else_s  # NaN is not equal to itself
