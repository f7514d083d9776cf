"""`python -m benchmarks.goodput --json r.json`: goodput_live, goodput_restart."""

from __future__ import annotations

import math
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.baseline.job import RestartJob
from benchmarks.baseline.methods import Method
from benchmarks.goodput.trace import DAY_S, LIVER_EVENTS_A_DAY, goodput_of_a_day
from benchmarks.harness import BenchmarkResult, Spread, interleaved, parser, reported
from benchmarks.live_runs import LiveRun
from benchmarks.models import MODEL_25M, text_data
from liver_hpc.cli.submission import checked_run, new_run
from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import read_run
from liver_hpc.report.traces import Cost
from liver_hpc.run.records import RunRecords

SMALL, LARGE = Layout(1, 1, 2), Layout(2, 1, 2)
EVENT_S = 120.0


@dataclass(frozen=True)
class Scale:
    """rounds: of a live and a restarting run each. events: of a run's compressed trace; gap_s:
    between them. steps: undisturbed ones before the first event and after the last."""

    rounds: int
    events: int
    gap_s: float
    steps: int
    model: Mapping[str, Any]

    @property
    def compression(self) -> float:
        """How much faster events come than LIVER_EVENTS_A_DAY."""
        return DAY_S / LIVER_EVENTS_A_DAY / self.gap_s


FULL = Scale(5, 2, 17.0, 6, MODEL_25M)
QUICK = Scale(1, 2, 3.0, 3, {**MODEL_25M, "layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4})


@dataclass(frozen=True)
class Lived:
    """One run under the compressed trace: its goodput, its length, and what each change cost."""

    goodput: float
    length_s: float
    costs: tuple[Cost, ...]


def config_of(scale: Scale) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "goodput",
            "runs_directory": "runs/bench",
            "model": dict(scale.model),
            "data": text_data(),
            "train": {"steps": 100_000, "global_batch": 4},
            "workers": {"initial": 2, "max": 4},
            "layouts": {2: {"dp": 2}, 4: {"tp": 2, "dp": 2}},
        }
    )


# ---- measuring


class Trace:
    """Events by the clock, from now on: workers are granted, workers are taken, in turn."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._clock, self._pause = SystemClock(), threading.Event()
        self._begun_s = self._clock.now_s()

    def targets(self) -> Iterator[Layout]:
        """Waits for each event; one that came while the one before it was answered, and has been
        followed by another, is left out."""
        events = self._scale.events
        for number in range(events):
            if number + 1 < events and self._clock.now_s() >= self._at_s(number + 1):
                continue
            self._wait_until(self._at_s(number))
            yield LARGE if number % 2 == 0 else SMALL

    def await_end(self) -> None:
        """A gap after the last event."""
        self._wait_until(self._at_s(self._scale.events))

    def _at_s(self, number: int) -> float:
        return self._begun_s + number * self._scale.gap_s

    def _wait_until(self, at_s: float) -> None:
        self._pause.wait(max(0.0, at_s - self._clock.now_s()))


def live_run(scale: Scale) -> Lived:
    """A run to which workers are given and from which they are taken, live."""
    with LiveRun(config_of(scale), EVENT_S) as run:
        run.settle(scale.steps)
        trace = Trace(scale)
        for target in trace.targets():
            run.resize(target)
        run.await_handoffs()
        run.settle(scale.steps)
        trace.await_end()
    return lived(run.records(), live_costs(run.records()))


def restarting_run(scale: Scale) -> Lived:
    """The same job and trace; every change is a checkpoint, a stop and a start."""
    run = new_run(*checked_run(config_of(scale), "local"))
    costs = []
    with RestartJob(run.path) as job:
        job.begin(SMALL)
        job.train(scale.steps)
        trace = Trace(scale)
        for target in trace.targets():
            if target != job.layout:
                done = job.restart(target, Method.MEGATRON, scale.steps)
                costs.append(Cost(done.record().lost_s, done.reconfiguration_s))
        trace.await_end()
        job.stop()
    return lived(read_run(run.path), costs)


def lived(records: RunRecords, costs: Sequence[Cost]) -> Lived:
    """What a run's own records say."""
    figures = run_figures(records)
    return Lived(figures.goodput, figures.wall_s, tuple(costs))


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


def result(scale: Scale, runs: Mapping[str, Sequence[Lived]]) -> BenchmarkResult:
    """The measured runs, and whole days under the costs that were measured in them."""
    claimed: dict[str, float] = {}
    spread: dict[str, Spread] = {}
    rows = []
    for kind, lives in runs.items():
        costs = [cost for life in lives for cost in life.costs]
        values = {"": [life.goodput for life in lives], "_day": [goodput_of_a_day(costs)]}
        for name, found in values.items():
            spread[f"goodput_{kind}{name}"] = Spread.of(found)
            claimed[f"goodput_{kind}{name}"] = statistics.median(found)
        spread[f"{kind}: lost_s"] = Spread.of([cost.lost_s for cost in costs])
        rows += [
            {
                "kind": kind,
                "round": number,
                "goodput": life.goodput,
                "length_s": life.length_s,
                "changes": len(life.costs),
                "lost_s": math.fsum(cost.lost_s for cost in life.costs),
            }
            for number, life in enumerate(lives)
        ]
    return BenchmarkResult(
        name="goodput",
        figures=claimed,
        rows=rows,
        method=_method(scale),
        spread=spread,
        repeats=scale.rounds,
    )


def _method(scale: Scale) -> dict[str, str]:
    return {
        "goodput": "useful steps at the undisturbed median of their layout over wall time, from "
        "the run's own records: the share of time in which training made progress",
        "trace": f"{scale.events} events, workers that are granted and workers that are taken in "
        f"turn, {scale.gap_s:g} s apart: {LIVER_EVENTS_A_DAY} events a day, compressed "
        f"{scale.compression:.0f} times. An event that comes while the one before it is answered "
        "waits; of several that wait the last is answered",
        "live, restart": f"{scale.rounds} real runs each, interleaved, of the same job and trace; "
        "a restart saves, stops, starts and loads with dist_checkpointing, and trains on until "
        "its notice",
        "day": "a day of evenly spaced events under the measured costs, not compressed",
        "cost": "of a handoff lost time and slowdown, both; of a restart lost time",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser("goodput", "progress while workers come and go").parse_args(arguments)
    scale = QUICK if given.quick else FULL
    kinds = {"live": partial(live_run, scale), "restart": partial(restarting_run, scale)}
    return reported(lambda: result(scale, interleaved(kinds, scale.rounds)), given)


if __name__ == "__main__":
    sys.exit(main())
