"""From measured rows to the claimed figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.baseline.methods import Method
from benchmarks.baseline.phases import EXISTS
from benchmarks.harness import BenchmarkResult, Spread, machine_kind
from benchmarks.reconfigure.sweep import LIVE, Sweep

LEAST_STEPS = 0.01
"""A lost time or cost below this share of a step counts as it: noise is no infinite ratio."""

LEAST_SIZES = 3
"""Two points lie on a line whatever they mean."""

Row = Mapping[str, Any]
Facts = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Measured:
    """All repeats of one variant, size, transition and method. lost_steps: in the target's median
    steps. cost_s: lost time and slowdown together. num_bytes: that moved, or of the checkpoint."""

    variant: str
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
    num_bytes: float

    @property
    def least_lost_s(self) -> float:
        """The median, not below what can be told from nothing."""
        return max(self.lost_s.median, LEAST_STEPS * self.median_step_s)

    @property
    def least_cost_s(self) -> float:
        """The same of the cost."""
        return max(self.cost_s.median, LEAST_STEPS * self.median_step_s)

    @property
    def name(self) -> str:
        words = (self.variant, self.size, self.transition, self.method)
        return " ".join(filter(None, words))


Of = Callable[[Measured], float]


def measured(rows: Sequence[Row]) -> list[Measured]:
    """One for each variant, size, transition and method, in the order in which they appear."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (row["variant"], row["size"], row["transition"], row["method"])
        groups.setdefault(key, []).append(row)

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
            num_bytes=statistics.median(row["bytes"] for row in group),
        )
        for key, group in groups.items()
    ]


def figures(found: Sequence[Measured]) -> dict[str, float]:
    """What is claimed, of the first variant; a figure whose rows are missing is left out.

    cost_over_restart: lost time and slowdown of the handoff over the restart's lost time, by size
    and transition, of medians. reconfiguration_over_restart: notice to first step, of the one over
    the other. speedup: lost time of the restart over that of the handoff; existing_speedup: the
    same against a restart whose checkpoint exists already; warm_speedup: against one whose
    processes had imported everything. lost_steps_max_SIZE: the largest median of a transition;
    lost_steps_worst_SIZE: of any repeat.
    """
    first = [m for m in found if m.variant == found[0].variant]
    live = [m for m in first if m.method == LIVE]
    claimed: dict[str, float] = {}
    pairs = _pairs(live, [m for m in first if m.method == Method.MEGATRON])
    shares: dict[str, Callable[[Measured, Measured], float]] = {
        "cost_over_restart": lambda m, restart: m.least_cost_s / restart.lost_s.median,
        "reconfiguration_over_restart": lambda m, restart: (
            m.reconfiguration_s.median / restart.reconfiguration_s.median
        ),
    }
    for name, share in shares.items():
        if pairs:
            claimed[f"{name}_median"] = statistics.median(share(*pair) for pair in pairs)
            claimed[f"{name}_max"] = max(share(*pair) for pair in pairs)
    for name, method in (
        ("speedup", Method.MEGATRON.value),
        ("existing_speedup", Method.MEGATRON.value + EXISTS),
        ("warm_speedup", Method.MEGATRON_WARM.value),
    ):
        if pairs := _pairs(live, [m for m in first if m.method == method]):
            ratios = [restart.lost_s.median / m.least_lost_s for m, restart in pairs]
            claimed[f"{name}_min"] = min(ratios)
            claimed[f"{name}_median"] = statistics.median(ratios)
    for size in dict.fromkeys(m.size for m in live):
        steps = [m.lost_steps for m in live if m.size == size]
        claimed[f"lost_steps_max_{size}"] = max(spread.median for spread in steps)
        claimed[f"lost_steps_worst_{size}"] = max(spread.high for spread in steps)
    return claimed


def spreads(rows: Sequence[Row]) -> dict[str, Spread]:
    """Of the figures: the same of each round alone."""
    rounds: dict[int, list[Row]] = {}
    for row in rows:
        rounds.setdefault(row["round"], []).append(row)
    found: dict[str, list[float]] = {}
    for of_round in rounds.values():
        alone = measured(of_round)
        for name, value in {**figures(alone), **of_variants(alone)}.items():
            found.setdefault(name, []).append(value)
    return {name: Spread.of(values) for name, values in found.items()}


def of_variants(found: Sequence[Measured]) -> dict[str, float]:
    """Each variant over the first one: lost time and cost of the handoff, lost time of the restart;
    medians over sizes and transitions, of medians."""
    compared: dict[str, float] = {}
    variants = list(dict.fromkeys(m.variant for m in found))
    ratios: dict[str, tuple[str, Of]] = {
        "lost_over_first": (LIVE, lambda m: m.least_lost_s),
        "cost_over_first": (LIVE, lambda m: m.least_cost_s),
        "restart_over_first": (Method.MEGATRON.value, lambda m: m.lost_s.median),
    }
    for variant in variants[1:]:
        for name, (method, of) in ratios.items():
            both = [
                [m for m in found if m.variant == one and m.method == method]
                for one in (variant, variants[0])
            ]
            if pairs := _pairs(*both):
                ratio = statistics.median(of(other) / of(first) for other, first in pairs)
                compared[f"{name}_{variant.replace(' ', '_')}"] = ratio
    return compared


def fitted(found: Sequence[Measured]) -> dict[str, float]:
    """Lost time as a line over bytes, by least squares, where there are three sizes or more:
    seconds at none, seconds a gigabyte (10^9), and the share of the variance that it explains."""
    lines: dict[str, float] = {}
    for name, method in ((LIVE, LIVE), ("restart", Method.MEGATRON.value)):
        of_method = [m for m in found if m.method == method and m.variant == found[0].variant]
        if len({m.size for m in of_method}) < LEAST_SIZES:
            continue
        gigabytes = [m.num_bytes / 1e9 for m in of_method]
        lost_s = [m.lost_s.median for m in of_method]
        slope, fixed_s = statistics.linear_regression(gigabytes, lost_s)
        lines[f"{name}_lost_s_fixed"] = fixed_s
        lines[f"{name}_lost_s_per_gb"] = slope
        lines[f"{name}_lost_explained"] = statistics.correlation(gigabytes, lost_s) ** 2
    return lines


def _pairs(some: Sequence[Measured], others: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Those of the same size and transition."""
    by_key = {(m.size, m.transition): m for m in others}
    return [(m, by_key[m.size, m.transition]) for m in some if (m.size, m.transition) in by_key]


def result(
    sweep: Sweep, rows: Sequence[Row], machine: Facts | None = None, failures: int = 0
) -> BenchmarkResult:
    """The sweep's result from all rows that there are, measured on such a machine, after so many
    attempts that failed."""
    machine = machine or {}
    variants = [variant.name for variant in sweep.variants] or [""]
    # The first is what is claimed of.
    rows = sorted(rows, key=lambda row: variants.index(row["variant"]))
    found = measured(rows)
    sizes = list(sweep.models)
    transitions = [transition.name for transition in sweep.transitions]

    def place(one: Measured) -> tuple[int, int, int, bool]:
        """As the sweep's file has them, live first."""
        return (
            sizes.index(one.size),
            transitions.index(one.transition),
            variants.index(one.variant),
            one.method != LIVE,
        )

    live = {(m.variant, m.size, m.transition): m.least_lost_s for m in found if m.method == LIVE}
    lines = [
        {
            "size": m.size,
            "transition": m.transition,
            **({"variant": m.variant} if sweep.variants else {}),
            "method": m.method,
            "cost_s": m.cost_s.median,
            "lost_s": m.lost_s.median,
            "worst_s": m.lost_s.high,
            "lost_steps": m.lost_steps.median,
            "over_live": m.lost_s.median / live.get((m.variant, m.size, m.transition), math.nan),
            "slowdown_s": m.slowdown_s.median,
            "notice_to_first_step_s": m.reconfiguration_s.median,
            "detection_s": m.detection_s.median,
            "bytes": m.num_bytes,
        }
        for m in sorted(found, key=place)
    ]
    return BenchmarkResult(
        name=sweep.name,
        figures={
            **figures(found),
            **of_variants(found),
            **fitted(found),
            "failed_attempts": float(failures),
        },
        rows=lines,
        samples=rows,
        method={
            **_method(sweep, rows),
            **_nodes(rows),
            **_faster(found),
            **({"machine": machine_kind(machine)} if machine else {}),
        },
        spread={
            **spreads(rows),
            **{
                f"{name} {m.name}": getattr(m, name) for m in found for name in ("lost_s", "cost_s")
            },
        },
        repeats=min((m.lost_s.count for m in found), default=0),
        machine=machine,
    )


def _nodes(rows: Sequence[Row]) -> dict[str, str]:
    """Words where cells were on several nodes."""
    hosts: dict[tuple[str, str, int], set[str]] = {}
    for row in rows:
        hosts.setdefault((row["variant"], row["size"], row["round"]), set()).add(
            row.get("host", "")
        )
    named = sorted(set().union(*hosts.values()))
    if len(named) < 2:
        return {}
    apart = sum(len(each) > 1 for each in hosts.values())
    return {
        "nodes": f"cells were on {', '.join(named)}; in {apart} of {len(hosts)} rounds of a size "
        "the methods that are compared were not all on one node, so that their ratios, and the "
        "spread of these, are also those of nodes; slurm.node keeps all cells to one"
    }


def _faster(found: Sequence[Measured]) -> dict[str, str]:
    """Words where steps beside a handoff were faster than those without one."""
    names = ", ".join(m.name for m in found if m.slowdown_s.median < 0)
    return {"slowdown": f"below zero, which makes the cost too low: {names}"} if names else {}


def _method(sweep: Sweep, rows: Sequence[Row]) -> dict[str, str]:
    array = max((row.get("array", 0) for row in rows), default=0)
    words = {
        "lost time": "end of the source's last step to the end of the target's first, less the "
        "target's median step; the same for a handoff and a restart",
        "cost": "lost time and slowdown: all that the change has taken from training; of a restart "
        "lost time alone",
        "restart": "megatron-core's dist_checkpointing, saved by all replicas in parallel, loaded "
        "by every worker for itself, as Megatron-LM does by default; after the save "
        "the workers leave at once, and the next ones are started directly: no scheduler, no "
        "launcher and no queue in between; page cache of the node warm, that of a storage's "
        "servers as it was; on GPUs its workers load kernels when first launched "
        "(CUDA_MODULE_LOADING=LAZY, unless that is exported), those of a handoff all when they "
        "begin",
        "exists": "the same restart less its save: the checkpoint of that very step exists already",
        "notice to first step": "from the request, with all that comes before the boundary: of a "
        "handoff boot, preparation and waiting for the boundary, of a restart waiting for it",
        "detection": "every change is announced: from the request to the coordinator's notice of "
        "it, to be added where notice to first step is wanted with detection; a worker lost "
        "without a word costs both ways the same time until it is missed",
        "spread": "of a ratio: the same ratio in each round alone",
        "failed attempts": "cells that could not be measured, or whose task was killed or "
        "cancelled, and which were tried again",
        "floor": f"a handoff's lost time, and its cost, count as at least {LEAST_STEPS:g} step in "
        "ratios",
        "order": "all sizes, variants and methods once, then once more the other way round",
    }
    if array:
        words["array"] = (
            f"cells were tasks of a Slurm array, {array} at a time, each alone on a node"
        )
    if array > 1:
        del words["order"]
        words["array"] += (
            ": those of one round ran side by side and did not take turns, and restarts that saved "
            "and loaded at the same time shared the storage, which no handoff uses"
        )
    if Method.MEGATRON_WARM in sweep.methods:
        words["warm"] = (
            "the next layout's processes have been there before the request, with everything "
            "imported, the device open and nothing built; what that took is not counted"
        )
    if sweep.cores == "apart":
        words["cores"] = (
            "each worker keeps to a core of its own, by its place on the node, also while it "
            "boots; its own threads share that core; agents, coordinator and benchmark are where "
            "there is room"
        )
    if sweep.variants:
        words["variants"] = (
            f"compared with {sweep.variants[0].name!r}, of which all figures are that name no other"
        )
    if any(variant.storage_bytes_per_s for variant in sweep.variants):
        words["storage"] = (
            "a restart's save and load take at least as long as all bytes of the checkpoint take "
            "once at that rate, over all workers together: less than any real storage of that rate"
        )
    if sweep.testbed is not None:
        words["links"] = (
            "each worker on a node of its own of the test cluster (network namespaces), whose link "
            "tc bounds in each direction, training's too; the storage is this machine's, unbounded"
        )
    return words
