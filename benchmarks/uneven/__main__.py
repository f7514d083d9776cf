"""`python -m benchmarks.uneven --json u.json`: throughput_7_of_8."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkResult, Row, Spread, interleaved, parser, reported
from benchmarks.models import text_data
from benchmarks.transitions.pool import Pool, open_seat
from benchmarks.uneven.model import Cell, StepModel, ideal
from liver_hpc.cli.submission import with_prepared_data
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap

LIMIT_S = 300.0
"""The longest that anything may take."""
WARM_STEPS = 2
SEAT = "benchmarks.uneven.seat:TimedSeat"
ALL, LEFT, HALF = 8, 7, 4
BATCH = 128
CURVE = (8, 16, 32, 64, 128, 256, 512)
EVEN = tuple(Cell(workers, workers * most) for workers in (1, 2) for most in (1, 2, 4, 8))
ODD = (Cell(2, 3), Cell(2, 7))
"""Uneven worlds of as many workers as there are cores, which the fit does not see."""
DIRECT = (Cell(ALL, 16), Cell(LEFT, 16))

METHOD = {
    "measured": "step times of real worlds over gloo: dp1 and dp2 with 1, 2, 4 and 8 micro-batches "
    "a worker, a core and a thread for each worker as long as nothing else runs on the machine; "
    "all worlds are warm and take turns, a step each",
    "fitted": "step = fixed + 2 (n - 1) / n reduce + each ceil(M / n): n workers, M micro-batches "
    "in the global batch; to the medians of all turns, and for the spread to each turn alone",
    "modelled": "what the fit says of 8, 7 and 4 workers, none of which have a core each here: "
    "that a step of theirs costs the same fixed part, that the reduction grows as a ring's, and "
    "that the worker with most micro-batches sets the pace",
    "throughput_7_of_8": "samples (and so tokens) a second of 7 workers over those of 8, of 128 "
    "micro-batches in the global batch; throughput_4_of_8: of falling back to half",
    "uneven_over_model": "measured steps of uneven worlds (dp2 with 3 and 7 micro-batches, a core "
    "a worker), which the fit has not seen, over what it says: the ratio that is farthest from 1",
    "shared_cores_7_of_8": "7 real workers against 8, with 16 micro-batches, all on this machine's "
    "few cores: there the sum of all computing counts and not the worker that computes most, so "
    "that it shows only that an uneven share adds no work of its own (1: none)",
}


@dataclass(frozen=True)
class Effort:
    """turns: steps of each world that count."""

    turns: int
    hidden: int
    cells: Sequence[Cell]

    @property
    def workers(self) -> int:
        return max(cell.workers for cell in self.cells)


FULL = Effort(15, 256, (*EVEN, *ODD, *DIRECT))
QUICK = Effort(3, 64, (Cell(1, 1), Cell(1, 4), Cell(2, 2), Cell(2, 8), Cell(2, 3)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("uneven", "what seven of eight workers keep of the throughput")
    given = options.parse_args(arguments)
    return reported(lambda: run(QUICK if given.quick else FULL), given)


def run(effort: Effort) -> BenchmarkResult:
    """Times the steps of every world, in turns; then the figures."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = with_prepared_data(config_of(effort, directory))
        with Pool(effort.workers, partial(open_seat, directory, kind=SEAT)) as pool:
            _build(pool, config, effort.cells)
            makers = {cell.name: _timer(pool, cell) for cell in effort.cells}
            interleaved(makers, WARM_STEPS)
            steps_s = interleaved(makers, effort.turns)
    return result({cell: steps_s[cell.name] for cell in effort.cells})


def config_of(effort: Effort, directory: Path) -> RunConfig:
    """What all worlds train, but for their global batch; a micro-batch is one sample."""
    sizes = {"layers": 4, "hidden": effort.hidden, "ffn_hidden": 2 * effort.hidden}
    largest = max(cell.micro_batches for cell in effort.cells)
    return RunConfig.model_validate(
        {
            "model": {"heads": 4, "query_groups": 2, "seq_length": 128, **sizes},
            "data": text_data(directory),
            "train": {"steps": WARM_STEPS + effort.turns, "global_batch": largest},
            "workers": {"initial": 1, "max": effort.workers},
            "layouts": {1: {"dp": 1}},
        }
    )


def _build(pool: Pool, config: RunConfig, cells: Sequence[Cell]) -> None:
    """All worlds, one after the other."""
    layouts = sorted({Layout(1, 1, cell.workers) for cell in cells})
    pool.call("open the model", LIMIT_S, "open", config)
    (spec,) = filter(None, pool.call("derive its spec", LIMIT_S, "derive", 0, layouts))
    pool.call("take its spec", LIMIT_S, "take_spec", spec)
    for generation, cell in enumerate(cells):
        rank_map = RankMap(Layout(1, 1, cell.workers), tuple(range(cell.workers)))
        world = (cell.name, rank_map, generation, cell.micro_batches)
        pool.call(f"build {cell.name}", LIMIT_S, "build_batched", *world)


def _timer(pool: Pool, cell: Cell) -> Callable[[], float]:
    """What times one more step of a world, on the first of its workers."""
    steps = itertools.count()

    def timed() -> float:
        taken = pool.call(f"train {cell.name}", LIMIT_S, "timed", cell.name, next(steps))
        return float(taken[0])

    return timed


def result(steps_s: Mapping[Cell, Sequence[float]]) -> BenchmarkResult:
    """The figures, of the least times of all turns; `steps_s` has as many times for each world."""
    turns = [
        dict(zip(steps_s, times_s, strict=True)) for times_s in zip(*steps_s.values(), strict=True)
    ]
    least_s = {cell: min(times_s) for cell, times_s in steps_s.items()}
    whole, model = _figures(least_s), StepModel.fitted(own_cores(least_s))
    each = [_figures(times_s) for times_s in turns]
    return BenchmarkResult(
        "uneven",
        whole | {"ideal_7_of_8": ideal(LEFT, ALL, BATCH)},
        [_row(model, count) for count in CURVE],
        method=METHOD,
        spread={name: Spread.of([figures[name] for figures in each]) for name in whole},
        repeats=len(turns),
        samples=[
            {
                "workers": cell.workers,
                "micro_batches": cell.micro_batches,
                "least_s": least_s[cell],
                "median_s": median(times_s),
                "model_s": model.step_s(cell),
            }
            for cell, times_s in steps_s.items()
        ],
    )


def own_cores(steps_s: Mapping[Cell, Any]) -> dict[Cell, Any]:
    """The worlds whose workers have a core each."""
    return {cell: value for cell, value in steps_s.items() if cell not in DIRECT}


def _figures(step_s: Mapping[Cell, float]) -> dict[str, float]:
    """What one time for each world says."""
    model = StepModel.fitted(own_cores(step_s))
    found = {
        "throughput_7_of_8": model.throughput(LEFT, ALL, BATCH),
        "throughput_4_of_8": model.throughput(HALF, ALL, BATCH),
        "fixed_s": model.fixed_s,
        "reduce_s": model.reduce_s,
        "micro_batch_s": model.each_s,
        "micro_batch_alone_s": model.alone_s,
    }
    uneven = {cell: taken_s for cell, taken_s in own_cores(step_s).items() if not cell.even}
    ratios = [taken_s / model.step_s(cell) for cell, taken_s in uneven.items()]
    found["uneven_over_model"] = max(ratios, key=lambda ratio: abs(ratio - 1))
    if {*DIRECT} <= step_s.keys():
        eight, seven = DIRECT
        found["shared_cores_7_of_8"] = step_s[eight] / step_s[seven]
    return found


def _row(model: StepModel, micro_batches: int) -> Row:
    """A line of the curve over the number of micro-batches in the global batch."""
    return {
        "micro_batches": micro_batches,
        "throughput_7_of_8": model.throughput(LEFT, ALL, micro_batches),
        "ideal_7_of_8": ideal(LEFT, ALL, micro_batches),
        "throughput_4_of_8": model.throughput(HALF, ALL, micro_batches),
        "ideal_4_of_8": ideal(HALF, ALL, micro_batches),
    }


if __name__ == "__main__":
    sys.exit(main())
