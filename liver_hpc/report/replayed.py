"""What a trace of events would have cost, by what a run's own changes have cost. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.derive import ReconfigurationFigures, RunFigures, run_figures
from liver_hpc.report.hours import held_spans, overlap_s
from liver_hpc.report.traces import (
    Cost,
    Played,
    Strategy,
    Trace,
    play,
    read_trace,
    without_events,
)
from liver_hpc.run.records import RunRecords

LIVE, RESTART, STABLE = "live", "restart", "none preemptible"


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
        "strategies": [
            {**vars(each), "tokens_per_hour": each.tokens_per_hour}
            for each in strategies(trace, costs)
        ],
    }


def strategies(trace: Trace, costs: Measured) -> list[Played]:
    """A node that is gone before it could be left live costs what a restart costs."""
    live = Strategy(LIVE, costs.live, late=costs.restart)
    restart = Strategy(RESTART, lambda before, after: costs.restart, late=costs.restart)
    return [
        play(trace, live, costs.rate),
        play(trace, restart, costs.rate),
        without_events(trace, STABLE, costs.rate),
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
    busy_s = statistics.median(each.reconfiguration_s for each in attempts)
    return Cost(lost_s, max(lost_s, busy_s))


def _restart(records: RunRecords) -> tuple[float, str]:
    """What of it the run has measured; steps since the last checkpoint are in none of it."""
    if gaps_s := _gaps_s(records):
        return statistics.median(gaps_s), "the median of its own restarts, while nodes were held"
    granted_s = min((each.granted_s for each in records.holdings), default=math.nan)
    first_s = records.steps[0].started_s if records.steps else math.nan
    if not first_s > granted_s:
        raise ConfigError("--trace wants a run whose start is recorded: a restart is judged by it")
    return first_s - granted_s, "its start, from the grant of nodes to a first step; nothing saved"


def _gaps_s(records: RunRecords) -> list[float]:
    """Between the last step of a world and the first of the next one, as long as a node was held,
    where that was no handoff, no recovery and no way back."""
    live = {each.generation for each in records.reconfigurations}
    live |= {generation + 1 for generation in live} | {r.generation for r in records.recoveries}
    held = held_spans(records.holdings) or [(-math.inf, math.inf)]  # none is known
    found = []
    for before, step in zip(records.steps, records.steps[1:], strict=False):
        if step.generation != before.generation and step.generation not in live:
            found.append(overlap_s(held, before.ended_s, step.started_s))
    return found
