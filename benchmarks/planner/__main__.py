"""`python -m benchmarks.planner`: one worker's plan, from 64 to 65,536 workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import BenchmarkResult, Spread, interleaved, parser, reported
from benchmarks.planner.cases import Case, cases, fresh_model
from benchmarks.planner.derivation import derived
from benchmarks.planner.measure import Planned, peak_bytes, plan_once, plan_parameters
from benchmarks.planner.placements import distances, place_s, resolve_s

if TYPE_CHECKING:  # it imports megatron-core, which may be absent
    from benchmarks.planner.megatron_planner import MegatronPlanner

SIZES = (64, 256, 1024, 4096, 16384, 65536)
QUICK_SIZES = (64, 1024)
MEGATRON_WORKERS = 1024
QUICK_MEGATRON_WORKERS = 64

OVER_EXACT = "bytes_between_nodes_over_exact"

METHOD = {
    "model": "126 layers, hidden 16384, 8 query groups, bf16 parameters, fp32 Adam; tp8 pp16 and "
    "as much dp as the workers allow (64 workers: tp4)",
    "handoffs": "grow and shrink by one data-parallel replica; reshape: half the tp, pp 9. The "
    "target's seats come from placement",
    "time": "CPU seconds of one thread from the two lists of worker ids to one worker's sorted "
    "plan, parameters and optimizer state; caches emptied before each. plan_s_N: the slowest "
    "sampled worker of all three handoffs, median of its repeats",
    "memory": "peak of Python's allocations (tracemalloc) during one such plan",
    "auto": "CPU seconds of resolve_layouts for that model; 2,048 micro-batches, 120 GiB a worker",
    "placement": "CPU seconds in which the target is seated, eight workers a node, the slowest of "
    "the handoffs; bytes_between_nodes_over_exact: handoffs of a small model on 2 to 6 nodes of 2 "
    "to 8 workers, bytes that no worker of their node holds, over the least of all placements "
    "whose tensor-parallel groups are within nodes; the largest ratio",
    "derivation": "wall seconds and peak resident memory of the child that derives the spec of "
    "that model from megatron-core's own, for seven layouts",
    "megatron": "megatron.core.resharding.planner's own code; one rank plans for all, parameters "
    "only; its gather of metadata and its broadcast of plans are not timed. Against it: our plan "
    "of the parameters alone, the slowest sampled worker, on the same rank maps, interleaved. The "
    "figure is the smallest ratio of the three handoffs",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    sizes: tuple[int, ...] = SIZES
    megatron_workers: int = MEGATRON_WORKERS
    sampled_workers: int = 7
    repeats: int = 5
    placed_workers: int = 4096
    compared_placements: int = 60
    derives: bool = True


QUICK = Effort(
    QUICK_SIZES,
    QUICK_MEGATRON_WORKERS,
    sampled_workers=2,
    repeats=1,
    placed_workers=1024,
    compared_placements=8,
    derives=False,
)


def main(arguments: list[str] | None = None) -> int:
    options = parser("planner", __doc__ or "").parse_args(arguments)
    return reported(lambda: run(QUICK if options.quick else Effort()), options)


def run(effort: Effort) -> BenchmarkResult:
    """Measures all sizes, then Megatron's planner beside ours."""
    rows: list[dict[str, Any]] = []
    slowest: dict[int, Spread] = {}
    for workers in effort.sizes:
        for case in cases(workers):
            row, spread = measured(case, effort)
            rows.append(row)
            if workers not in slowest or spread.median > slowest[workers].median:
                slowest[workers] = spread
    figures = {f"plan_s_{workers}": spread.median for workers, spread in slowest.items()}
    if {1024, 16384} <= set(slowest):
        figures["growth_1024_to_16384"] = slowest[16384].median / slowest[1024].median
    spreads = {f"plan_s_{workers}": spread for workers, spread in slowest.items()}
    ratios = dict(megatron_ratios(effort))
    if ratios:
        least = min(ratios.values(), key=lambda spread: spread.median)
        name = f"megatron_over_ours_{effort.megatron_workers}"
        figures[name], spreads[name] = least.median, least
        spreads |= {f"{name}_{case}": spread for case, spread in ratios.items()}
    placing = placements(effort)
    spreads |= placing
    figures |= {name: spread.median for name, spread in placing.items()}
    figures[OVER_EXACT] = placing[OVER_EXACT].high
    if effort.derives:
        made = derived()
        figures |= {"derive_405b_s": made.took_s, "derive_405b_bytes": made.peak_bytes}
    return BenchmarkResult(
        "planner", figures, rows, method=METHOD, spread=spreads, repeats=effort.repeats
    )


def placements(effort: Effort) -> dict[str, Spread]:
    """Times at size, of the case that takes longest, and distances from the best at small sizes."""
    workers, model = effort.placed_workers, fresh_model()
    resolving = [resolve_s(workers) for _ in range(effort.repeats)]
    placing = [
        Spread.of([place_s(case, model) for _ in range(effort.repeats)]) for case in cases(workers)
    ]
    slowest = max(placing, key=lambda spread: spread.median)
    return {
        f"resolve_layouts_s_{workers}": Spread.of(resolving),
        f"place_s_{workers}": slowest,
        OVER_EXACT: Spread.of([*distances(effort.compared_placements)]),
    }


def measured(case: Case, effort: Effort) -> tuple[dict[str, Any], Spread]:
    """A row of the table, and the repeats of the slowest worker."""
    sample = case.sample(effort.sampled_workers)
    plans: dict[str, list[Planned]] = interleaved(
        {str(worker): partial(plan_once, case, worker) for worker in sample}, effort.repeats
    )
    took = {worker: [plan.took_s for plan in made] for worker, made in plans.items()}
    worst = max(took, key=lambda worker: median(took[worker]))
    spread = Spread.of(took[worst])
    row = {
        "workers": case.workers,
        "handoff": case.name,
        "layouts": f"{case.source} > {case.target}",
        "median_worker_s": median(median(times) for times in took.values()),
        "slowest_worker_s": spread.median,
        "most_moves": max(p[0].sends + p[0].receives + p[0].local for p in plans.values()),
        "peak_bytes": peak_bytes(case, int(worst)),
    }
    return row, spread


def megatron_ratios(effort: Effort) -> Iterator[tuple[str, Spread]]:
    """Megatron's time over ours, by handoff; nothing where it cannot be imported."""
    try:
        from benchmarks.planner.megatron_planner import MegatronPlanner
    except ImportError as error:
        print(f"no comparison with Megatron's planner: {error}", file=sys.stderr)
        return
    for case in cases(effort.megatron_workers):
        theirs = MegatronPlanner(case)
        times = interleaved(
            {
                "megatron": partial(_megatron_s, theirs),
                "ours": partial(_slowest_parameters, case, effort),
            },
            effort.repeats,
        )
        pairs = zip(times["megatron"], times["ours"], strict=True)
        yield case.name, Spread.of([their_s / our_s for their_s, our_s in pairs])


def _megatron_s(planner: MegatronPlanner) -> float:
    return planner.plan()[0]


def _slowest_parameters(case: Case, effort: Effort) -> float:
    return max(plan_parameters(case, worker) for worker in case.sample(effort.sampled_workers))


if __name__ == "__main__":
    sys.exit(main())
