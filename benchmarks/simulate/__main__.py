"""`python -m benchmarks.simulate [RUN ...]`: large worlds, by a model fitted to small runs.

RUN: directories of runs with handoffs; without any, two small ones are made, which takes minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.goodput.trace import LIVER_EVENTS_A_DAY
from benchmarks.harness import BenchmarkResult, Spread, parser, reported
from benchmarks.planner.cases import STAGES, TENSOR_RANKS, fresh_model
from benchmarks.simulate.play import ControlLink
from benchmarks.simulate.runs import MODELS, handoffs_of, make_runs
from benchmarks.simulate.scenario import Machine, Simulated, simulate
from benchmarks.simulate.timings import Measured, Timings, fit, held_out
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.layout.coordinates import Layout

SIZES = (1024, 4096, 16384, 65536)
QUICK_SIZES = (1024,)
LINK_BYTES_PER_S = 50e9
MEMORY_BYTES_PER_S = 1e12
WORKER_FLOPS = 400e12
SEQUENCE_TOKENS = 8192
GLOBAL_BATCH = 2048

METHOD = {
    "fitted": "boot, PREPARE, boundary, the fixed parts of the pause and of the first step beyond "
    "a step, to the handoffs of small runs on this machine (benchmarks/simulate/timings.py). What "
    "four workers cannot show, such as connecting thousands, is not in it",
    "model_error": "each measured handoff against a fit of all others: |predicted / measured - 1|, "
    "median and range; of the pause, of the reconfiguration time, and of both together. It says "
    "how well small handoffs are predicted, and nothing about the assumed link",
    "assumed": f"a link of {LINK_BYTES_PER_S:g} bytes/s a worker (InfiniBand NDR), "
    f"{MEMORY_BYTES_PER_S:g} bytes/s of device memory left for packing and digests, "
    f"{WORKER_FLOPS:g} operations/s a worker, {GLOBAL_BATCH} samples of {SEQUENCE_TOKENS} tokens a "
    "step; the coordinator's link carries 12.5e9 bytes/s with 50 us of latency",
    "simulated": "the 405B-like model of benchmarks.planner, tp8 pp16 and dp as workers allow; one "
    "replica's workers come or go, and the policy may then also halve tp. Layout by the policy, "
    "seats by placement, bytes by the plans of sampled workers, the real state machine and "
    "messages in simulated time: one event loop, whose CPU time is measured here while it runs",
    "goodput": f"share of a day with {LIVER_EVENTS_A_DAY} such handoffs that is not lost, the "
    "measured slowdown beside PREPARE counted as lost",
}


@dataclass(frozen=True)
class Effort:
    """How much is simulated, and of which runs."""

    sizes: tuple[int, ...] = SIZES
    models: tuple[Mapping[str, Any], ...] = MODELS


QUICK = Effort(QUICK_SIZES, MODELS[:1])


def main(arguments: list[str] | None = None) -> int:
    options = parser("simulate", __doc__ or "")
    options.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    given = options.parse_args(arguments)
    effort = QUICK if given.quick else Effort()
    return reported(lambda: run(measured_in(given.runs, effort), effort), given)


def measured_in(runs: Sequence[Path], effort: Effort) -> list[Measured]:
    """The handoffs of the given runs, or of small ones that are made. Raises LiverError."""
    if runs:
        return handoffs_of(runs)
    with tempfile.TemporaryDirectory() as directory:
        return handoffs_of(make_runs(Path(directory), effort.models))


def run(measured: Sequence[Measured], effort: Effort) -> BenchmarkResult:
    """Fits, says how well, and simulates all sizes."""
    errors = model_errors(measured)
    fitted = fit(measured)
    timings = fitted.over(LINK_BYTES_PER_S, MEMORY_BYTES_PER_S)
    rows, per_worker, figures = [], [], {}
    for workers in effort.sizes:
        handoffs = list(_handoffs(workers, timings))
        slowest = max(handoffs, key=lambda one: one.outcome.pause_s)
        figures[f"simulated_pause_s_{workers}"] = slowest.outcome.pause_s
        rows += [_row(one, timings) for one in handoffs]
        per_worker += [
            one.outcome.messages / max(one.source.workers, one.target.workers) for one in handoffs
        ]
    spread = {
        "model_error_median": Spread.of([*errors["pause_s"], *errors["reconfiguration_s"]]),
        "pause_error_median": Spread.of(errors["pause_s"]),
        "reconfiguration_error_median": Spread.of(errors["reconfiguration_s"]),
    }
    figures["control_messages_per_worker"] = max(per_worker)
    figures |= {name: found.median for name, found in spread.items()}
    samples = [
        {"handoff": one.name, "measured": asdict(one.times), "predicted": asdict(predicted)}
        for one, predicted in held_out(measured)
    ]
    return BenchmarkResult(
        "simulate",
        figures,
        rows,
        samples=samples,
        method=METHOD | {"fitted here": str(fitted), "used for large worlds": str(timings)},
        spread=spread,
        repeats=len(measured),
    )


def model_errors(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Relative errors by what was predicted, each handoff held out once."""
    pairs = held_out(measured)
    return {
        part: [abs(getattr(p, part) / getattr(one.times, part) - 1) for one, p in pairs]
        for part in ("pause_s", "reconfiguration_s")
    }


def _handoffs(workers: int, timings: Timings) -> Iterator[Simulated]:
    model = fresh_model()
    replica = TENSOR_RANKS * STAGES
    machine = Machine(
        timings,
        ControlLink(),
        DeadlineSection(),
        WORKER_FLOPS,
        batch_tokens=GLOBAL_BATCH * SEQUENCE_TOKENS,
        global_batch=GLOBAL_BATCH,
    )
    source = Layout(TENSOR_RANKS, STAGES, workers // replica)
    yield simulate(model, machine, source, workers + replica)
    if source.dp > 1:
        yield simulate(model, machine, source, workers - replica)


def _row(one: Simulated, timings: Timings) -> dict[str, Any]:
    outcome = one.outcome
    return {
        "workers": one.source.workers,
        "layouts": f"{one.source} > {one.target}",
        "step_s": one.step_s,
        "pause_s": outcome.pause_s,
        "lost_s": one.lost_s,
        "reconf_s": outcome.first_step_ended_s,
        "goodput": one.goodput(LIVER_EVENTS_A_DAY, timings.slowdown_s),
        "messages": outcome.messages,
        "control_MB": outcome.num_bytes / 1e6,
        "loop_s": outcome.busy_s,
        "longest_turn_s": outcome.longest_s,
        "place_s": one.place_s,
        "moved_TB": one.moved_bytes / 1e12,
    }


if __name__ == "__main__":
    sys.exit(main())
