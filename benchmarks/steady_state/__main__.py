"""`python -m benchmarks.steady_state`: a run without events against a plain Megatron loop."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import torch

from benchmarks.harness import (
    BenchmarkResult,
    Spread,
    interleaved,
    loss_difference,
    parser,
    reported,
)
from benchmarks.models import MODEL_100M, text_data
from benchmarks.steady_state.sides import LiverRun, PlainLoop, Step
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.derive import ReconfigurationFigures, run_figures

LIVER, PLAIN = "liver_hpc", "plain"
LAYOUT, AWAY = Layout(1, 1, 2), Layout(1, 2, 1)
WARM_STEPS = 5
SETTLED_STEPS = 6
"""Undisturbed steps between handoffs, of which medians are taken."""

METHOD = {
    "sides": "a whole run of liver_hpc (coordinator, agent, workers; metrics written) without any "
    "event, and a loop of torch.distributed, parallel_state, Megatron's DDP, distributed optimizer "
    "and schedule; the same model, samples, layout (dp2) and number of training processes, one "
    "thread each",
    "interleaving": "both are alive and warm; in turns one trains for a block while all processes "
    "of the other are stopped (SIGSTOP)",
    "overhead_percent": "median time from step end to step end, of the steps that lie in a block, "
    "over the plain loop's in the block beside it; median of the pairs",
    "cpu_overhead_percent": "CPU seconds of all processes of a side, coordinator and agent "
    "included, a step, over the plain loop's in the block beside it; median of the pairs; wobbles "
    "less than time does",
    "interference_steps": "slowdown of the steps beside one handoff (boot, PREPARE, RELEASE), in "
    "median steps; dp2 to pp2 and back, in which nobody joins; of `replace` a worker joins. "
    "cost_steps: with its lost time. The plain loop is stopped meanwhile",
    "loss_difference": "largest relative difference of a step's loss between the sides, over the "
    "first steps: both do the same work",
    "on a GPU": "one training process a side, and no handoffs: NCCL's kernels of a process that "
    "is stopped would stay on the GPU. 100M parameters in bf16, 1,024 tokens a sequence",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured; quick: a model that steps in milliseconds. rounds: of handoffs, of
    which each has three."""

    blocks: int = 9
    block_s: float = 8.0
    rounds: int = 3
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"layers": 4, "hidden": 256, "ffn_hidden": 512, "heads": 4}
    )
    layout: Layout = LAYOUT


QUICK = Effort(
    2, 2.0, 1, {"layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "seq_length": 32}
)
ON_A_GPU = Effort(
    7, 4.0, 0, {**MODEL_100M, "seq_length": 1024, "dtype": "bf16"}, layout=Layout(1, 1, 1)
)


@dataclass(frozen=True)
class Block:
    """What one side did while the other was stopped. steps: those that lie in it as a whole."""

    period_s: float
    steps: int
    all_steps: int
    cpu_s: float

    def a_step(self, total: float) -> float:
        """NaN without a step."""
        return total / self.all_steps if self.all_steps else math.nan


def main(arguments: list[str] | None = None) -> int:
    options = parser("steady_state", __doc__ or "").parse_args(arguments)
    effort = QUICK if options.quick else ON_A_GPU if torch.cuda.is_available() else Effort()
    return reported(lambda: run(effort), options)


def run(effort: Effort) -> BenchmarkResult:
    """Starts both sides, measures them in turns, ends them."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with LiverRun(_config(effort, directory)) as live:
            live.live.reach(WARM_STEPS)
            live.pause()
            with PlainLoop(live.run.config(), effort.layout, directory) as plain:
                plain.await_steps(WARM_STEPS)
                plain.pause()
                blocks = interleaved(
                    {
                        LIVER: partial(_block, live, effort.block_s),
                        PLAIN: partial(_block, plain, effort.block_s),
                    },
                    effort.blocks,
                )
                difference = loss_difference(_losses(live.steps()), _losses(plain.steps()))
                live.resume()
                handoffs = _hand_off(live, effort.rounds) if effort.rounds else []
    return _result(blocks, difference, handoffs)


def _hand_off(side: LiverRun, rounds: int) -> list[ReconfigurationFigures]:
    """Away and back, then one worker replaced, `rounds` times; in this order."""
    live = side.live
    live.settle(SETTLED_STEPS)
    for _ in range(rounds):
        for change in (partial(live.resize, AWAY), partial(live.resize, LAYOUT), live.replace):
            change()
            live.await_handoffs()
            live.settle(SETTLED_STEPS)
    return list(run_figures(live.records()).reconfigurations)


def _config(effort: Effort, directory: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "steady-state",
            "runs_directory": str(directory / "runs"),
            "model": dict(effort.model),
            "data": text_data(directory),
            "train": {"steps": 1_000_000, "global_batch": 8, "micro_batch": 2},
            "schedule": {"style": "constant"},
            "workers": {"initial": effort.layout.workers, "max": LAYOUT.workers},
            "layouts": {1: {"dp": 1}, LAYOUT.workers: [{"dp": LAYOUT.dp}, {"pp": AWAY.pp}]},
            "cluster": {"kind": "local"},
            # Processes that are stopped for a block must not count as lost.
            "deadlines": {"heartbeat_s": 300.0, "control_s": 300.0, "collective_s": 600.0},
        }
    )


def _block(side: LiverRun | PlainLoop, block_s: float) -> Block:
    """Lets one side train for a while."""
    before, cpu_before_s = len(side.steps()), side.cpu_s()
    side.resume()
    began_s = time.time()
    Event().wait(block_s)
    side.pause()
    ended_s = time.time()
    steps = side.steps()
    periods_s = periods(steps, began_s, ended_s)
    return Block(
        period_s=median(periods_s) if periods_s else math.nan,
        steps=len(periods_s),
        all_steps=len(steps) - before,
        cpu_s=side.cpu_s() - cpu_before_s,
    )


def periods(steps: Sequence[Step], began_s: float, ended_s: float) -> list[float]:
    """Seconds from step end to step end, of the steps that begin and end in a span of time."""
    return [
        after.ended_s - before.ended_s
        for before, after in pairwise(steps)
        if began_s <= before.ended_s and after.ended_s <= ended_s
    ]


def _losses(steps: Sequence[Step]) -> dict[int, float]:
    """Of the first 20."""
    return {each.step: each.loss for each in steps[:20]}


def _result(
    blocks: Mapping[str, list[Block]],
    difference: float,
    handoffs: Sequence[ReconfigurationFigures],
) -> BenchmarkResult:
    spread = {
        "overhead_percent": pairs_percent(blocks, lambda block: block.period_s),
        "cpu_overhead_percent": pairs_percent(blocks, lambda block: block.a_step(block.cpu_s)),
        **interference(handoffs),
    }
    figures = {name: each.median for name, each in spread.items()}
    figures["loss_difference"] = difference
    rows = [
        {
            "side": name,
            "block": number,
            "period_s": block.period_s,
            "steps": block.steps,
            "cpu_s_per_step": block.a_step(block.cpu_s),
        }
        for number in range(len(blocks[PLAIN]))
        for name, block in ((side, blocks[side][number]) for side in (LIVER, PLAIN))
    ]
    return BenchmarkResult(
        "steady_state",
        figures,
        rows,
        method=METHOD,
        spread=spread,
        repeats=spread["overhead_percent"].count,
    )


def pairs_percent(blocks: Mapping[str, list[Block]], of: Callable[[Block], float]) -> Spread:
    """How much more each block has than the plain loop's beside it; NaN where none is known."""
    ratios = [
        of(live) / of(plain) for live, plain in zip(blocks[LIVER], blocks[PLAIN], strict=True)
    ]
    return Spread.of([100 * (each - 1) for each in ratios if math.isfinite(each)] or [math.nan])


def interference(handoffs: Sequence[ReconfigurationFigures]) -> dict[str, Spread]:
    """What handoffs took from the steps beside them, and in all; with joiners apart."""
    found: dict[str, Spread] = {}
    for name, joins in (("", False), ("join_", True)):
        chosen = [each for each in handoffs if each.completed and _joins(each) == joins]
        for what, steps in (
            ("interference", [each.cost_steps - each.lost_steps for each in chosen]),
            ("cost", [each.cost_steps for each in chosen]),
        ):
            if steps:
                found[f"{name}{what}_steps"] = Spread.of(steps)
    return found


def _joins(handoff: ReconfigurationFigures) -> bool:
    source, target = (
        set(ids.split(",")) for ids in (handoff.source_workers, handoff.target_workers)
    )
    return not target <= source


if __name__ == "__main__":
    sys.exit(main())
