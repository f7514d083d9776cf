"""`python -m benchmarks.convergence --json r.json`: max_relative_loss_difference."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import BenchmarkResult, Spread, loss_differences, losses, parser, reported
from benchmarks.live_runs import LiveRun
from benchmarks.models import layout_table, text_data
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.worlds import ABORTED, COMPLETED
from liver_hpc.run.records import RunRecords

LAYOUTS = tuple(map(Layout.parse, ("tp2 dp2", "pp2 dp2", "dp4", "tp2", "pp2", "dp2")))
"""The elastic run goes round in these; it begins in the last."""
EVENT_S = 300.0
WORST_ROWS = 10


@dataclass(frozen=True)
class Scale:
    """handoffs: of the elastic run, with `apart` steps at least between two."""

    handoffs: int
    apart: int
    hidden: int


FULL, QUICK = Scale(18, 20, 192), Scale(2, 3, 64)


def config_of(scale: Scale, first: Layout) -> RunConfig:
    """A run that begins in `first` and ends when it is stopped: all runs see the same samples."""
    sizes = {"layers": 4, "hidden": scale.hidden, "ffn_hidden": 2 * scale.hidden}
    return RunConfig.model_validate(
        {
            "name": "convergence",
            "runs_directory": "runs/bench",
            "model": {"heads": 4, "query_groups": 2, "seq_length": 64, **sizes},
            "data": text_data(),
            "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
            "schedule": {"warmup_steps": 20, "decay_steps": 1000},
            "train": {"steps": 20_000, "global_batch": 8, "micro_batch": 1},
            "workers": {"initial": 2, "max": 4},
            "layouts": layout_table((first, *LAYOUTS)),
        }
    )


def elastic_run(scale: Scale) -> RunRecords:
    """Through all layouts, again and again."""
    with LiveRun(config_of(scale, LAYOUTS[-1]), EVENT_S) as run:
        run.settle(scale.apart)
        for number in range(scale.handoffs):
            run.resize(LAYOUTS[number % len(LAYOUTS)])
            run.await_handoffs()
            run.settle(scale.apart)
    return run.records()


def fixed_run(scale: Scale, layout: Layout, steps: int) -> RunRecords:
    """At least `steps` steps in one layout."""
    with LiveRun(config_of(scale, layout), EVENT_S) as run:
        run.reach(steps)
    return run.records()


def differences(ours: RunRecords, fixed: RunRecords) -> list[float]:
    """|loss - fixed loss| / fixed loss of every step that both runs have done. Raises LiverError
    where one was not recorded, or is no number."""
    mine, theirs = losses(ours), losses(fixed)
    common = range(min(max(mine), max(theirs)) + 1)
    missing = [step for step in common if step not in mine or step not in theirs]
    if missing:
        raise LiverError(f"steps {missing} were not recorded")
    return list(loss_differences(mine, theirs).values())


def result(elastic: RunRecords, fixed: RunRecords, control: RunRecords) -> BenchmarkResult:
    """Against the fixed run: the elastic one, and the control, fixed in another layout."""
    done = [r for r in elastic.reconfigurations if r.outcome == COMPLETED and r.digest_equal]
    if any(r.outcome == ABORTED for r in elastic.reconfigurations):
        raise LiverError("a handoff was aborted: its run is no measurement")
    ours, theirs = differences(elastic, fixed), differences(control, fixed)
    fixed_losses = losses(fixed)
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "fixed_loss": fixed_losses[step],
            "relative_difference": ours[step],
            "control_difference": theirs[step],
        }
        for step in range(min(len(ours), len(theirs)))
    ]
    worst = sorted(rows, key=lambda row: -row["relative_difference"])[:WORST_ROWS]
    return BenchmarkResult(
        name="convergence",
        figures={
            "max_relative_loss_difference": max(ours),
            "median_relative_loss_difference": statistics.median(ours),
            "final_relative_loss_difference": ours[-1],
            "control_max_relative_loss_difference": max(theirs),
            "handoffs": float(len(done)),
            "steps": float(len(rows)),
        },
        rows=worst,
        method={
            "elastic": f"{len(done)} handoffs over six layouts of 2 and 4 workers, all digests "
            "equal; every step's loss against the same step of a run fixed in dp2",
            "control": "a run fixed in tp2: another order of summation, and no handoff at all",
            "rows": "the steps that differ most; all of them are among the samples",
            "repeats": "both are the same in every repetition, but for rounding",
        },
        spread={
            "relative difference by step": Spread.of(ours),
            "control difference by step": Spread.of(theirs),
        },
        samples=rows,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("convergence", "the loss of a run with many handoffs against a fixed one")
    given = options.parse_args(arguments)
    scale = QUICK if given.quick else FULL
    return reported(lambda: run(scale), given)


def run(scale: Scale) -> BenchmarkResult:
    """The elastic run, and two fixed ones of as many steps."""
    elastic = elastic_run(scale)
    steps = 1 + max(record.step for record in elastic.steps)
    fixed = fixed_run(scale, LAYOUTS[-1], steps)
    control = fixed_run(scale, Layout.parse("tp2"), steps)
    return result(elastic, fixed, control)


if __name__ == "__main__":
    sys.exit(main())
