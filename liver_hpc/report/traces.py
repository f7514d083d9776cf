"""Traces of events, and what they cost a job that answers them. Pure, but for `read_trace`.

A job that is busy answering one event answers all that came meanwhile at once, with its next
change.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from liver_hpc.errors import ConfigError

COLUMNS = ("at_s", "workers", "warning_s")
HOUR_S = 3600.0


@dataclass(frozen=True)
class Cost:
    """One answer to an event. lost_s: training stands still, or is slower by as much in sum.
    busy_s: from its begin until the next one can begin; at least lost_s."""

    lost_s: float
    busy_s: float


@dataclass(frozen=True)
class Event:
    """At `at_s` so many workers' nodes come, or are warned that they go, `warning_s` later."""

    at_s: float
    workers: int
    warning_s: float = 0.0


@dataclass(frozen=True)
class Trace:
    """workers: those that are there from the start, and never go. length_s: of all of it."""

    workers: int
    length_s: float
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Strategy:
    """How a job answers. cost: of a change from so many workers to so many. late: of leaving nodes
    that are gone before `cost` says that they are left."""

    name: str
    cost: Callable[[int, int], Cost]
    late: Cost


@dataclass(frozen=True)
class Played:
    """What a trace comes to. tokens: trained. held_h: worker-hours of nodes that were held. lost_h:
    of them in which workers with a seat made no progress. goodput: the share of time in which
    training made progress. changes: answers; late: those of them that came too late."""

    strategy: str
    tokens: float
    held_h: float
    lost_h: float
    goodput: float
    changes: int
    late: int

    @property
    def tokens_per_hour(self) -> float:
        """Tokens for each worker-hour that was held."""
        return self.tokens / self.held_h


def play(trace: Trace, strategy: Strategy, rate: Callable[[int], float]) -> Played:
    """rate: tokens a second of so many workers."""
    workers, at_s, length_s = trace.workers, 0.0, trace.length_s
    tokens = lost_s = lost_worker_s = 0.0
    changes = late = 0
    waiting = list(trace.events)
    while waiting:
        begun_s = max(at_s, waiting[0].at_s)
        group = [event for event in waiting if event.at_s <= begun_s]
        waiting = waiting[len(group) :]
        target = workers + sum(event.workers for event in group)
        if target == workers or begun_s >= length_s:
            continue
        cost = strategy.cost(workers, target)
        gone_s = min((e.at_s + e.warning_s for e in group if e.workers < 0), default=math.inf)
        if begun_s + cost.busy_s > gone_s:
            cost, late = strategy.late, late + 1
        ended_s = min(begun_s + cost.busy_s, length_s)
        stood_s = min(cost.lost_s, length_s - begun_s)
        tokens += rate(workers) * (ended_s - at_s - stood_s)
        lost_s, lost_worker_s = lost_s + stood_s, lost_worker_s + stood_s * workers
        workers, at_s, changes = target, ended_s, changes + 1
    tokens += rate(workers) * (length_s - at_s)
    lost_h, held_h = lost_worker_s / HOUR_S, _held_s(trace) / HOUR_S
    return Played(strategy.name, tokens, held_h, lost_h, 1.0 - lost_s / length_s, changes, late)


def without_events(trace: Trace, name: str, rate: Callable[[int], float]) -> Played:
    """Of the workers that are there from the start, alone."""
    held_h = trace.workers * trace.length_s / HOUR_S
    return Played(name, rate(trace.workers) * trace.length_s, held_h, 0.0, 1.0, 0, 0)


def _held_s(trace: Trace) -> float:
    """Nodes are held until they are gone, not until they are warned."""
    held_s = trace.workers * trace.length_s
    for event in trace.events:
        from_s = event.at_s + (event.warning_s if event.workers < 0 else 0.0)
        held_s += event.workers * max(0.0, trace.length_s - from_s)
    return held_s


# ---- files


def read_trace(path: Path) -> Trace:
    """A CSV file with the columns `COLUMNS`: the first row, at 0, has the workers that stay, the
    last one, with 0 workers, the end. Raises ConfigError, which names file and line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not rows or tuple(rows[0])[:2] != COLUMNS[:2]:
        raise ConfigError(f"{path}: wanted a first line {','.join(COLUMNS)}, and rows below it")
    events = [_event(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
    first, *between, end = events if len(events) > 1 else [*events, events[0]]
    if first.at_s != 0 or first.workers <= 0:
        raise ConfigError(f"{path}, row 1: wanted at_s 0, and the workers that stay, got {first}")
    if end.workers != 0 or end.at_s <= 0:
        raise ConfigError(
            f"{path}, row {len(rows)}: wanted the end, with 0 workers, after 0 s, got {end}"
        )
    there = first.workers
    for number, (before, event) in enumerate(pairwise(events), start=2):
        there += event.workers
        if event.at_s < before.at_s:
            raise ConfigError(f"{path}, row {number}: it is earlier than the row before it")
        if there < first.workers:
            raise ConfigError(
                f"{path}, row {number}: {there} workers are left; the {first.workers} of row 1 stay"
            )
    return Trace(first.workers, end.at_s, tuple(each for each in between if each.workers))


def _event(where: str, row: dict[str, str]) -> Event:
    try:
        event = Event(float(row["at_s"]), int(row["workers"]), float(row.get("warning_s") or 0.0))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: wanted numbers for {','.join(COLUMNS)}: {error}") from None
    if not (math.isfinite(event.at_s) and math.isfinite(event.warning_s) and event.warning_s >= 0):
        raise ConfigError(f"{where}: wanted finite times, and a warning_s of 0 or more")
    return event
