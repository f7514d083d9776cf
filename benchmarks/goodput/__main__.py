"""`python -m benchmarks.goodput --json r.json`: goodput_live, goodput_restart."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.goodput.trace import (
    DAY_S,
    LIVER_EVENTS_A_DAY,
    Cost,
    even_trace,
    goodput,
    poisson_trace,
)
from benchmarks.harness import BenchmarkResult, Spread, parser, report
from benchmarks.live_runs import LiveRun
from liver_hpc.baseline.job import RestartJob
from liver_hpc.baseline.methods import Method
from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.metrics.derive import run_figures
from liver_hpc.metrics.records import RunRecords
from liver_hpc.run_directory import create_run_directory
from liver_hpc.submit import checked_run, with_prepared_data

SMALL, LARGE = Layout(1, 1, 2), Layout(2, 1, 2)
RATES = (LIVER_EVENTS_A_DAY, 4 * LIVER_EVENTS_A_DAY, 16 * LIVER_EVENTS_A_DAY)
SEEDS = range(5)
EVENT_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Scale:
    """events: of the live run's compressed trace; gap_s: between them. restarts: that are really
    done. steps: undisturbed ones of each world."""

    events: int
    gap_s: float
    restarts: int
    steps: int
    model: Mapping[str, int]

    @property
    def compression(self) -> float:
        """How much faster events come than LIVER_EVENTS_A_DAY."""
        return DAY_S / LIVER_EVENTS_A_DAY / self.gap_s


FULL = Scale(12, 20.0, 6, 6, {"layers": 8, "hidden": 512, "ffn_hidden": 1536, "heads": 8})
QUICK = Scale(2, 3.0, 2, 3, {"layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4})


def config_of(scale: Scale) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "goodput",
            "runs_directory": "runs/bench",
            "model": {"query_groups": 4, "seq_length": 32, **scale.model},
            "data": {"text": "python-stdlib", "max_text_bytes": 1 << 20},
            "train": {"steps": 100_000, "global_batch": 4},
            "workers": {"initial": 2, "max": 4},
            "layouts": {2: {"dp": 2}, 4: {"tp": 2, "dp": 2}},
        }
    )


# ---- measuring


def live_run(scale: Scale) -> RunRecords:
    """A run to which workers are given and taken away again, by the clock."""
    clock, pause = SystemClock(), threading.Event()
    with LiveRun(config_of(scale), EVENT_S) as run:
        run.settle(scale.steps)
        begun_s = clock.now_s()
        for number in range(scale.events):
            pause.wait(max(0.0, begun_s + number * scale.gap_s - clock.now_s()))
            run.resize(LARGE if number % 2 == 0 else SMALL)
        run.await_handoffs()
        run.settle(scale.steps)
        pause.wait(max(0.0, begun_s + scale.events * scale.gap_s - clock.now_s()))
    return run.records()


def restart_costs(scale: Scale) -> list[Cost]:
    """Restarts that are really done, there and back; a job is busy for as long as it takes."""
    config, _ = checked_run(config_of(scale), "local")
    run = create_run_directory(with_prepared_data(config))
    found = []
    with RestartJob(run.path) as job:
        job.begin(SMALL)
        job.train(scale.steps)
        for number in range(scale.restarts):
            target = LARGE if number % 2 == 0 else SMALL
            done = job.restart(target, Method.MEGATRON, scale.steps)
            found.append(Cost(done.record().lost_s, done.reconfiguration_s))
        job.stop()
    return found


def live_costs(records: RunRecords) -> list[Cost]:
    """What each handoff of a run took away: lost time, and what slower steps beside it add up to.
    Raises LiverError when one has not completed."""
    found = []
    for attempt in run_figures(records).reconfigurations:
        if not attempt.completed:
            raise LiverError(f"generation {attempt.generation} {attempt.outcome}")
        lost_s = max(0.0, attempt.lost_s) + max(0.0, attempt.slowdown_s)
        found.append(Cost(lost_s, max(lost_s, attempt.reconfiguration_s)))
    return found


# ---- figures


def result(scale: Scale, records: RunRecords, restarts: Sequence[Cost]) -> BenchmarkResult:
    """The measured run, and the same trace and others under the measured costs."""
    live, figures = live_costs(records), run_figures(records)
    length_s = figures.wall_s
    trace_s = even_trace(scale.events, length_s)
    claimed = {
        "goodput_live": figures.goodput,
        "goodput_restart": goodput(trace_s, length_s, restarts),
        "goodput_live_by_costs": goodput(trace_s, length_s, live),
        "goodput_live_day": goodput(even_trace(LIVER_EVENTS_A_DAY, DAY_S), DAY_S, live),
        "goodput_restart_day": goodput(even_trace(LIVER_EVENTS_A_DAY, DAY_S), DAY_S, restarts),
    }
    spread: dict[str, Spread] = {
        "live: lost_s": Spread.of([cost.lost_s for cost in live]),
        "restart: lost_s": Spread.of([cost.lost_s for cost in restarts]),
    }
    for rate in RATES:
        for kind, costs in (("live", live), ("restart", restarts)):
            values = [goodput(poisson_trace(rate, DAY_S, seed), DAY_S, costs) for seed in SEEDS]
            name = f"goodput_{kind}_poisson_{rate}"
            claimed[name], spread[name] = statistics.median(values), Spread.of(values)
    rows = [
        {"kind": kind, "number": number, "lost_s": cost.lost_s, "busy_s": cost.busy_s}
        for kind, costs in (("live", live), ("restart", restarts))
        for number, cost in enumerate(costs)
    ]
    return BenchmarkResult(
        name="goodput",
        figures=claimed,
        rows=rows,
        method={
            "goodput": "useful steps at the undisturbed median of their layout over wall time",
            "goodput_live": f"a real run of {length_s:.0f} s with {scale.events} events, workers "
            f"that join and workers that leave in turn: {LIVER_EVENTS_A_DAY} events a day, "
            f"compressed {scale.compression:.0f} times",
            "goodput_restart": f"the same trace under the costs of {len(restarts)} restarts "
            "(dist_checkpointing) that were really done on the same machine",
            "goodput_live_by_costs": "the same arithmetic for the live run, as a check of it",
            "day, poisson": "a day under the measured costs, not compressed; arrivals at "
            + ", ".join(map(str, RATES))
            + f" events a day, {len(SEEDS)} seeds each",
            "live costs": "lost time and slowdown, both; time while joiners boot is no loss but "
            "for the slowdown",
        },
        spread=spread,
        repeats=min(len(live), len(restarts)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser("goodput", "progress while workers come and go").parse_args(arguments)
    scale = QUICK if given.quick else FULL
    try:
        restarts = restart_costs(scale)
        report(result(scale, live_run(scale), restarts), given.json)
    except LiverError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
