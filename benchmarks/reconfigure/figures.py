"""From measured rows to the claimed figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.baseline.methods import Method
from benchmarks.baseline.phases import EXISTS
from benchmarks.harness import BenchmarkResult, Spread
from benchmarks.reconfigure.sweep import LIVE, Sweep

LEAST_STEPS = 0.01
"""A lost time below this share of a step counts as it: noise is no infinite ratio."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """All repeats of one size, transition and method. lost_steps: in the target's median steps.
    cost_s: lost time and slowdown together."""

    size: str
    transition: str
    method: str
    lost_s: Spread
    lost_steps: Spread
    slowdown_s: Spread
    cost_s: Spread
    reconfiguration_s: Spread
    detection_s: Spread
    median_step_s: float

    @property
    def least_lost_s(self) -> float:
        """The median, not below what can be told from nothing."""
        return max(self.lost_s.median, LEAST_STEPS * self.median_step_s)


def measured(rows: Sequence[Row]) -> list[Measured]:
    """One for each size, transition and method, in the order in which they first appear."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["size"], row["transition"], row["method"]), []).append(row)

    def spread(group: Sequence[Row], name: str) -> Spread:
        return Spread.of([row[name] for row in group])

    return [
        Measured(
            *key,
            lost_s=spread(group, "lost_s"),
            lost_steps=Spread.of([row["lost_s"] / row["median_step_s"] for row in group]),
            slowdown_s=spread(group, "slowdown_s"),
            cost_s=Spread.of([row["lost_s"] + row["slowdown_s"] for row in group]),
            reconfiguration_s=spread(group, "reconfiguration_s"),
            detection_s=spread(group, "detection_s"),
            median_step_s=statistics.median(row["median_step_s"] for row in group),
        )
        for key, group in groups.items()
    ]


def figures(found: Sequence[Measured]) -> dict[str, float]:
    """What is claimed; a figure whose rows are missing is left out.

    speedup: lost time of the restart over that of the handoff, by size and transition, of medians.
    existing_speedup: the same against a restart whose checkpoint exists already.
    cost_over_restart: lost time and slowdown of the handoff over the restart's lost time.
    reconfiguration_over_restart: notice to first step, of the one over the other.
    lost_steps_max_SIZE: the largest median of a transition; lost_steps_worst_SIZE: of any repeat.
    """
    by_key = {(m.size, m.transition, m.method): m for m in found}
    live = [m for m in found if m.method == LIVE]
    claimed: dict[str, float] = {}
    for name, method in (
        ("speedup", Method.MEGATRON.value),
        ("existing_speedup", Method.MEGATRON.value + EXISTS),
    ):
        pairs = [
            (by_key[m.size, m.transition, method], m)
            for m in live
            if (m.size, m.transition, method) in by_key
        ]
        if not pairs:
            continue
        ratios = [restart.lost_s.median / m.least_lost_s for restart, m in pairs]
        claimed[f"{name}_min"] = min(ratios)
        claimed[f"{name}_median"] = statistics.median(ratios)
        if name == "speedup":
            for figure, shares in (
                (
                    "cost_over_restart",
                    [m.cost_s.median / restart.lost_s.median for restart, m in pairs],
                ),
                (
                    "reconfiguration_over_restart",
                    [
                        m.reconfiguration_s.median / restart.reconfiguration_s.median
                        for restart, m in pairs
                    ],
                ),
            ):
                claimed[f"{figure}_median"] = statistics.median(shares)
                claimed[f"{figure}_max"] = max(shares)
    for size in dict.fromkeys(m.size for m in live):
        steps = [m.lost_steps for m in live if m.size == size]
        claimed[f"lost_steps_max_{size}"] = max(spread.median for spread in steps)
        claimed[f"lost_steps_worst_{size}"] = max(spread.high for spread in steps)
    return claimed


def result(sweep: Sweep, rows: Sequence[Row]) -> BenchmarkResult:
    """The sweep's result from all rows that there are."""
    found = measured(rows)
    sizes = list(sweep.models)
    transitions = [transition.name for transition in sweep.transitions]

    def place(one: Measured) -> tuple[int, int, bool]:
        """As the sweep's file has them, live first."""
        return sizes.index(one.size), transitions.index(one.transition), one.method != LIVE

    live = {(m.size, m.transition): m.least_lost_s for m in found if m.method == LIVE}
    lines = [
        {
            "size": m.size,
            "transition": m.transition,
            "method": m.method,
            "lost_s": m.lost_s.median,
            "worst_s": m.lost_s.high,
            "lost_steps": m.lost_steps.median,
            "over_live": m.lost_s.median / live.get((m.size, m.transition), math.nan),
            "slowdown_s": m.slowdown_s.median,
            "cost_s": m.cost_s.median,
            "notice_to_first_step_s": m.reconfiguration_s.median,
            "detection_s": m.detection_s.median,
        }
        for m in sorted(found, key=place)
    ]
    return BenchmarkResult(
        name="reconfigure",
        figures=figures(found),
        rows=lines,
        samples=list(rows),
        method=_method(sweep),
        spread={
            f"{name} {m.size} {m.transition} {m.method}": getattr(m, name)
            for m in found
            for name in ("lost_s", "cost_s")
        },
        repeats=min((m.lost_s.count for m in found), default=0),
    )


def _method(sweep: Sweep) -> dict[str, str]:
    return {
        "lost time": "end of the source's last step to the end of the target's first, less the "
        "target's median step; the same for a handoff and a restart",
        "cost": "lost time and slowdown: all that the change has taken from training; of a restart "
        "lost time alone",
        "restart": "megatron-core's dist_checkpointing, saved by all replicas in parallel, loaded "
        "by every worker for itself, as Megatron-LM does by default; after the save "
        "the workers leave at once, and the next ones are started directly: no scheduler, no "
        f"launcher and no queue in between; page cache {sweep.page_cache}",
        "exists": "the same restart less its save: the checkpoint of that very step exists already",
        "notice to first step": "from the request, with all that comes before the boundary: of a "
        "handoff boot, preparation and waiting for the boundary, of a restart waiting for it",
        "detection": "every change is announced: from the request to the coordinator's notice of "
        "it, to be added where notice to first step is wanted with detection; a worker lost "
        "without a word costs both ways the same time until it is missed",
        "floor": f"a handoff's lost time counts as at least {LEAST_STEPS:g} step in ratios",
        "order": "all sizes and methods once, then once more the other way round",
    }
