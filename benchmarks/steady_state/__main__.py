"""`python -m benchmarks.steady_state`: a run without events against a plain Megatron loop."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkResult, Spread, interleaved, parser, reported
from benchmarks.models import text_data
from benchmarks.steady_state.sides import (
    InstructionCounter,
    LiverRun,
    PlainLoop,
    Side,
    Step,
    wait_s,
)
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout

LIVER, PLAIN = "liver_hpc", "plain"
LAYOUT = Layout(1, 1, 2)
WARM_STEPS = 5

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
    "included, a step, over all blocks; wobbles less than time does",
    "loss_difference": "largest relative difference of a step's loss between the sides, over the "
    "first steps: both do the same work",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured; quick: a model that steps in milliseconds."""

    blocks: int = 9
    block_s: float = 8.0
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"layers": 4, "hidden": 256, "ffn_hidden": 512, "heads": 4}
    )


QUICK = Effort(2, 2.0, {"layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "seq_length": 32})


@dataclass(frozen=True)
class Block:
    """What one side did while the other was stopped. steps: those that lie in it as a whole.
    why_not: why there are no instructions."""

    period_s: float
    steps: int
    all_steps: int
    cpu_s: float
    instructions: int | None
    why_not: str


def main(arguments: list[str] | None = None) -> int:
    options = parser("steady_state", __doc__ or "").parse_args(arguments)
    return reported(lambda: run(QUICK if options.quick else Effort()), options.json)


def run(effort: Effort) -> BenchmarkResult:
    """Starts both sides, measures them in turns, ends them."""
    with tempfile.TemporaryDirectory() as directory:
        live = LiverRun(_config(effort, Path(directory)))
        try:
            live.await_steps(WARM_STEPS)
            live.pause()
            plain = PlainLoop(live.run.config(), LAYOUT, Path(directory))
            try:
                plain.await_steps(WARM_STEPS)
                plain.pause()
                sides: dict[str, Side] = {LIVER: live, PLAIN: plain}
                blocks = interleaved(
                    {name: partial(_block, side, effort.block_s) for name, side in sides.items()},
                    effort.blocks,
                )
                difference = loss_difference(live.steps(), plain.steps())
            finally:
                plain.close()
        finally:
            live.close()
    return _result(blocks, difference)


def _config(effort: Effort, directory: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "steady-state",
            "runs_directory": str(directory / "runs"),
            "model": dict(effort.model),
            "data": text_data(directory),
            "train": {"steps": 1_000_000, "global_batch": 8, "micro_batch": 2},
            "schedule": {"style": "constant"},
            "workers": {"initial": LAYOUT.workers, "max": LAYOUT.workers},
            "layouts": {LAYOUT.workers: [{"dp": LAYOUT.dp}]},
            "cluster": {"kind": "local"},
            # Processes that are stopped for a block must not count as lost.
            "deadlines": {"heartbeat_s": 300.0, "control_s": 300.0, "collective_s": 600.0},
        }
    )


def _block(side: Side, block_s: float) -> Block:
    """Lets one side train for a while."""
    before, cpu_before_s = len(side.steps()), side.cpu_s()
    counter = InstructionCounter(side.processes())
    side.resume()
    began_s = wait_s(block_s)
    side.pause()
    ended_s = time.time()
    instructions = counter.read()
    steps = side.steps()
    periods_s = periods(steps, began_s, ended_s)
    return Block(
        period_s=median(periods_s) if periods_s else math.nan,
        steps=len(periods_s),
        all_steps=len(steps) - before,
        cpu_s=side.cpu_s() - cpu_before_s,
        instructions=instructions,
        why_not=counter.why_not,
    )


def periods(steps: Sequence[Step], began_s: float, ended_s: float) -> list[float]:
    """Seconds from step end to step end, of the steps that begin and end in a span of time."""
    return [
        after.ended_s - before.ended_s
        for before, after in pairwise(steps)
        if began_s <= before.ended_s and after.ended_s <= ended_s
    ]


def loss_difference(some: Sequence[Step], others: Sequence[Step]) -> float:
    """Largest relative difference over the steps that both have done, of the first 20."""
    pairs = list(zip(some, others, strict=False))[:20]
    return max((abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs), default=math.nan)


def _result(blocks: Mapping[str, list[Block]], difference: float) -> BenchmarkResult:
    ratios = [
        100 * (live.period_s / plain.period_s - 1)
        for live, plain in zip(blocks[LIVER], blocks[PLAIN], strict=True)
        if math.isfinite(live.period_s) and math.isfinite(plain.period_s)
    ]
    overhead = Spread.of(ratios or [math.nan])
    figures = {
        "overhead_percent": overhead.median,
        "cpu_overhead_percent": 100 * (_per_step(blocks, "cpu_s") - 1),
        "loss_difference": difference,
    }
    method = dict(METHOD)
    why_not = next((one.why_not for side in blocks.values() for one in side if one.why_not), "")
    if why_not:
        method["instructions"] = f"not counted here: {why_not}"
    else:
        figures["instructions_overhead_percent"] = 100 * (_per_step(blocks, "instructions") - 1)
        method["instructions"] = "in user space, all processes of a side, by perf, a step"
    rows = [
        {
            "side": name,
            "block": number,
            "period_s": block.period_s,
            "steps": block.steps,
            "cpu_s_per_step": block.cpu_s / max(block.all_steps, 1),
        }
        for number in range(len(blocks[PLAIN]))
        for name, block in ((side, blocks[side][number]) for side in (LIVER, PLAIN))
    ]
    return BenchmarkResult(
        "steady_state",
        figures,
        rows,
        method=method,
        spread={"overhead_percent": overhead},
        repeats=len(ratios),
    )


def _per_step(blocks: Mapping[str, list[Block]], what: str) -> float:
    """How much of something a step costs under liver_hpc, over what it costs the plain loop."""

    def of(side: str) -> float:
        steps = sum(block.all_steps for block in blocks[side])
        return float(sum(getattr(block, what) or 0 for block in blocks[side])) / max(steps, 1)

    return of(LIVER) / of(PLAIN) if of(PLAIN) > 0 else math.nan


if __name__ == "__main__":
    sys.exit(main())
