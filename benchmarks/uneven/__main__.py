"""`python -m benchmarks.uneven --json u.json`: throughput_7_of_8."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.harness import BenchmarkResult, Row, Spread, interleaved, parser, reported
from benchmarks.live_runs import LiveRun
from benchmarks.models import text_data
from benchmarks.uneven.model import Cell, StepModel, ideal
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError

EVENT_S = 300.0
ALL, LEFT, HALF = 8, 7, 4
BATCH = 128
CURVE = (8, 16, 32, 64, 128, 256, 512)
EVEN = tuple(Cell(workers, workers * most) for workers in (1, 2) for most in (1, 2, 4, 8))
ODD = (Cell(2, 3), Cell(2, 7))
"""Uneven worlds of as many workers as there are cores, which the fit does not see."""
DIRECT = (Cell(ALL, 16), Cell(LEFT, 16))

METHOD = {
    "measured": "step times of whole runs, started as `liver submit` does: dp1 and dp2 with 1, 2, "
    "4 and 8 micro-batches a worker (median of the undisturbed steps of a run), each worker with a "
    "core of its own as long as nothing else runs on the machine",
    "fitted": "step = fixed + 2 (n - 1) / n reduce + each ceil(M / n): n workers, M micro-batches "
    "in the global batch; one fit for each repeat",
    "modelled": "what the fit says of 8, 7 and 4 workers, none of which have a core each here: "
    "that a step of theirs costs the same fixed part, that the reduction grows as a ring's, and "
    "that the worker with most micro-batches sets the pace",
    "throughput_7_of_8": "samples (and so tokens) a second of 7 workers over those of 8, of 128 "
    "micro-batches in the global batch; throughput_4_of_8: of falling back to half",
    "uneven_over_model": "largest of the ratios of a measured uneven step (dp2, 3 and 7 "
    "micro-batches, a core a worker) to what the fit, which has not seen it, says; and its inverse",
    "shared_cores_7_of_8": "7 and 8 real workers with 16 micro-batches, all on this machine's few "
    "cores: there the sum of all computing counts and not the slowest worker, so that it shows "
    "only that an uneven share adds no work and no waiting of its own (1 is none)",
}


@dataclass(frozen=True)
class Effort:
    """steps: that a run does when it is warm."""

    repeats: int
    steps: int
    hidden: int
    cells: Sequence[Cell]


FULL = Effort(3, 12, 256, (*EVEN, *ODD, *DIRECT))
QUICK = Effort(1, 4, 64, (Cell(1, 1), Cell(1, 4), Cell(2, 2), Cell(2, 8), Cell(2, 3)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("uneven", "what seven of eight workers keep of the throughput")
    given = options.parse_args(arguments)
    return reported(lambda: run(QUICK if given.quick else FULL), given.json)


def run(effort: Effort) -> BenchmarkResult:
    """Measures every world, again and again; then the figures."""
    makers: dict[str, Callable[[], float]] = {
        _name(cell): partial(measured_s, effort, cell) for cell in effort.cells
    }
    steps_s = interleaved(makers, effort.repeats)
    return result({cell: steps_s[_name(cell)] for cell in effort.cells})


def config_of(effort: Effort, cell: Cell) -> RunConfig:
    """A run in one world that ends when it is stopped; a micro-batch is one sample."""
    sizes = {"layers": 4, "hidden": effort.hidden, "ffn_hidden": 2 * effort.hidden}
    return RunConfig.model_validate(
        {
            "name": "uneven",
            "runs_directory": "runs/bench",
            "model": {"heads": 4, "query_groups": 2, "seq_length": 128, **sizes},
            "data": text_data(),
            "train": {"steps": 100_000, "global_batch": cell.micro_batches, "micro_batch": 1},
            "schedule": {"style": "constant"},
            "workers": {"initial": cell.workers, "max": cell.workers},
            "layouts": {cell.workers: [{"dp": cell.workers}]},
        }
    )


def measured_s(effort: Effort, cell: Cell) -> float:
    """The median of a run's undisturbed steps, in seconds."""
    with LiveRun(config_of(effort, cell), EVENT_S) as live:
        live.settle(effort.steps)
    steps = live.records().steps
    times_s = [step.ended_s - step.started_s for step in steps if not step.phase]
    if not times_s:
        raise LiverError(f"{live.run}: no undisturbed step was recorded")
    return median(times_s)


def result(steps_s: Mapping[Cell, Sequence[float]]) -> BenchmarkResult:
    """The figures of all repeats; `steps_s` has as many times for each world."""
    repeats = min(map(len, steps_s.values()))
    each = [
        {cell: times_s[number] for cell, times_s in steps_s.items()} for number in range(repeats)
    ]
    models = [StepModel.fitted(times_s) for times_s in each]
    spread = {
        "throughput_7_of_8": Spread.of([m.throughput(LEFT, ALL, BATCH) for m in models]),
        "throughput_4_of_8": Spread.of([m.throughput(HALF, ALL, BATCH) for m in models]),
        "fixed_s": Spread.of([model.fixed_s for model in models]),
        "reduce_s": Spread.of([model.reduce_s for model in models]),
        "micro_batch_s": Spread.of([model.each_s for model in models]),
        "uneven_over_model": Spread.of(
            [_worst_ratio(model, times_s) for model, times_s in zip(models, each, strict=True)]
        ),
    }
    all_workers, seven_workers = DIRECT
    if {all_workers, seven_workers} <= steps_s.keys():
        shared = [times_s[all_workers] / times_s[seven_workers] for times_s in each]
        spread["shared_cores_7_of_8"] = Spread.of(shared)
    figures = {name: found.median for name, found in spread.items()}
    return BenchmarkResult(
        "uneven",
        figures | {"ideal_7_of_8": ideal(LEFT, ALL, BATCH)},
        [_row(models, count) for count in CURVE],
        method=METHOD,
        spread=spread,
        repeats=repeats,
        samples=[
            {"workers": cell.workers, "micro_batches": cell.micro_batches, "step_s": step_s}
            for cell, times_s in steps_s.items()
            for step_s in times_s
        ],
    )


def _worst_ratio(model: StepModel, times_s: Mapping[Cell, float]) -> float:
    """Of an uneven world's time and the model's, the larger over the smaller."""
    ratios = [
        times_s[cell] / model.step_s(cell)
        for cell in times_s
        if not cell.even and cell not in DIRECT
    ]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def _row(models: Sequence[StepModel], micro_batches: int) -> Row:
    """A line of the curve over the number of micro-batches in the global batch."""

    def of(workers: int) -> float:
        return median(model.throughput(workers, ALL, micro_batches) for model in models)

    return {
        "micro_batches": micro_batches,
        "throughput_7_of_8": of(LEFT),
        "ideal_7_of_8": ideal(LEFT, ALL, micro_batches),
        "throughput_4_of_8": of(HALF),
        "ideal_4_of_8": ideal(HALF, ALL, micro_batches),
    }


def _name(cell: Cell) -> str:
    return f"dp{cell.workers}, {cell.micro_batches} micro-batches"


if __name__ == "__main__":
    sys.exit(main())
