"""Traces of events, and what they cost a job that answers them, by what a run's own changes have
cost. Pure, but for `read_trace`.

A job that is busy answering one event answers all that came meanwhile at once, with its next
change.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.derive import ReconfigurationFigures, RunFigures, run_figures
from liver_hpc.report.hours import HOUR_S, held_spans, in_any, overlap_s
from liver_hpc.run.records import RunRecords

COLUMNS = ("at_s", "workers", "warning_s")
LIVE, RESTART, STABLE = "live", "restart", "none preemptible"


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
    training made progress. changes: answers; late: those of them that came too late.
    tokens_per_hour: for each worker-hour that was held."""

    strategy: str
    tokens: float
    held_h: float
    lost_h: float
    goodput: float
    changes: int
    late: int
    tokens_per_hour: float


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
    goodput, rate_h = 1.0 - lost_s / length_s, tokens / held_h
    return Played(strategy.name, tokens, held_h, lost_h, goodput, changes, late, rate_h)


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


# ---- a run's own costs


@dataclass(frozen=True)
class Measured:
    """Of one run. grows, shrinks: a handoff to more workers, to as many or fewer. restart: with
    every change. restart_is: where that is from. rates: tokens a second by workers."""

    grows: Cost
    shrinks: Cost
    restart: Cost
    restart_is: str
    rates: Mapping[int, float]

    def rate(self, workers: int) -> float:
        """That of so many workers; where it was not measured, the nearest one's for each worker."""
        nearest = min(self.rates, key=lambda known: (abs(known - workers), known))
        return self.rates[nearest] * workers / nearest

    def live(self, before: int, after: int) -> Cost:
        return self.grows if after > before else self.shrinks


def compared(path: Path, records: RunRecords) -> dict[str, Any]:
    """For programs: each strategy's figures, and the costs behind them. Raises ConfigError for a
    trace that is none, and for a run that has not measured what is wanted."""
    trace, costs = read_trace(path), measured(run_figures(records), records)
    return {
        "workers": trace.workers,
        "length_s": trace.length_s,
        "events": len(trace.events),
        "grow": vars(costs.grows),
        "shrink": vars(costs.shrinks),
        "restart": vars(costs.restart),
        "restart_is": costs.restart_is,
        "tokens_per_s": dict(costs.rates),
        "strategies": [vars(each) for each in strategies(trace, costs)],
    }


def strategies(trace: Trace, costs: Measured) -> list[Played]:
    """A node that is gone before it could be left live costs what a restart costs."""
    live = Strategy(LIVE, costs.live, late=costs.restart)
    restart = Strategy(RESTART, lambda before, after: costs.restart, late=costs.restart)
    return [
        play(trace, live, costs.rate),
        play(trace, restart, costs.rate),
        play(replace(trace, events=()), replace(restart, name=STABLE), costs.rate),
    ]


def measured(figures: RunFigures, records: RunRecords) -> Measured:
    """Raises ConfigError where the run has no completed handoff, or nothing that a restart can be
    judged by."""
    done = [each for each in figures.reconfigurations if each.completed]
    done = [each for each in done if math.isfinite(each.cost_s + each.reconfiguration_s)]
    if not done:
        raise ConfigError("--trace wants a run with a completed handoff: its costs are taken")
    growing = [each for each in done if _growth(each) > 0]
    shrinking = [each for each in done if _growth(each) <= 0]
    restart_s, restart_is = _restart(records)
    rates: dict[int, list[float]] = defaultdict(list)
    for world in figures.generations:
        if world.layout and math.isfinite(world.tokens_per_s):
            rates[Layout.parse(world.layout).workers].append(world.tokens_per_s)
    if not rates:
        raise ConfigError("--trace wants a run with a world whose step time is known")
    return Measured(
        grows=_median(growing or done),
        shrinks=_median(shrinking or done),
        restart=Cost(restart_s, restart_s),
        restart_is=restart_is,
        rates={workers: statistics.median(found) for workers, found in sorted(rates.items())},
    )


def _growth(attempt: ReconfigurationFigures) -> int:
    return Layout.parse(attempt.target).workers - Layout.parse(attempt.source).workers


def _median(attempts: Sequence[ReconfigurationFigures]) -> Cost:
    lost_s = max(0.0, statistics.median(each.cost_s for each in attempts))
    busy_s = statistics.median(each.first_step_ended_s - each.began_s for each in attempts)
    return Cost(lost_s, max(lost_s, busy_s))


def _restart(records: RunRecords) -> tuple[float, str]:
    """What of it the run has measured; steps since the last checkpoint are in none of it."""
    if gaps_s := _gaps_s(records):
        return statistics.median(gaps_s), "the median of its own restarts, while nodes were held"
    if records.steps and records.holdings:
        first = records.steps[0]
        spans = _all_held(records, first.generation)
        granted_s = max((from_s for from_s, _ in spans if from_s < first.started_s), default=None)
        if granted_s is not None:
            start_s = first.started_s - granted_s
            return start_s, "its start, from the grant of nodes to a first step; nothing saved"
    raise ConfigError("--trace wants a run whose start is recorded: a restart is judged by it")


def _gaps_s(records: RunRecords) -> list[float]:
    """Between the last step of a world and the first of the next one, as long as all nodes of the
    one or of the other were held, where that was no handoff, no recovery and no way back."""
    live = {each.generation for each in records.reconfigurations}
    live |= {generation + 1 for generation in live} | {r.generation for r in records.recoveries}
    found = []
    for before, step in zip(records.steps, records.steps[1:], strict=False):
        if step.generation != before.generation and step.generation not in live:
            both = (_all_held(records, each.generation) for each in (before, step))
            held = in_any(chain(*both))
            found.append(overlap_s(held, before.ended_s, step.started_s))
    return found


def _all_held(records: RunRecords, generation: int) -> list[tuple[float, float]]:
    """When all nodes of a world were held: who waits for the last of them restarts nothing yet. Of
    a world of which it is not known where it sat, when any was."""
    nodes = {row.node for row in records.placements if row.generation == generation}
    if not nodes:
        return held_spans(records.holdings) or [(-math.inf, math.inf)]  # none is known
    spans = [(-math.inf, math.inf)]
    for node in nodes:
        of_node = held_spans(each for each in records.holdings if each.node == node)
        both = [(max(a, c), min(b, d)) for a, b in spans for c, d in of_node]
        spans = [(from_s, to_s) for from_s, to_s in both if from_s < to_s]
    return spans
