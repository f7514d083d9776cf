"""What snapshots cost a run that loses nobody: two runs, in turns, one with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread, interleaved
from benchmarks.models import MODEL_25M, text_data
from benchmarks.steady_state.sides import READY_S, LiverRun
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig

WITH, WITHOUT = "with copies", "without"
SEQUENCE, BATCH, MICRO_BATCH = 256, 32, 4
TOKENS = SEQUENCE * BATCH
WARM_STEPS = 3
_EVERY = re.compile(r"snapshots every (\d+) steps")


@dataclass(frozen=True)
class Block:
    """Whole steps of one side, while the other is stopped. every_steps: how often snapshots are
    taken at its end; NaN without."""

    steps: int
    cpu_s: float
    every_steps: float

    @property
    def cpu_s_per_step(self) -> float:
        return self.cpu_s / self.steps


def measure(directory: Path, pairs: int, least_steps: int) -> Mapping[str, Sequence[Block]]:
    """A block has `least_steps` at least; with snapshots, as many whole intervals between them."""
    with LiverRun(_config(directory, {"every_steps": "auto"})) as copied:
        copied.live.reach(WARM_STEPS)
        deadline = Deadline.after(SystemClock(), READY_S, "an interval between snapshots")
        poll_until(lambda: bool(told_intervals(copied.run.path)), deadline, 0.5)
        copied.pause()
        with LiverRun(_config(directory, {})) as plain:
            plain.live.reach(WARM_STEPS)
            plain.pause()
            sides = {
                WITHOUT: partial(_block, plain, least_steps),
                WITH: partial(_block_of_intervals, copied, least_steps),
            }
            return interleaved(sides, pairs)


def _config(directory: Path, snapshots: Mapping[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "recovery-copies",
            "runs_directory": str(directory / "runs"),
            "model": {**MODEL_25M, "seq_length": SEQUENCE},
            "data": text_data(directory / "data"),
            "train": {"steps": 100_000, "global_batch": BATCH, "micro_batch": MICRO_BATCH},
            "schedule": {"style": "constant"},
            "workers": {"initial": 2, "max": 2},
            "layouts": {2: {"dp": 2}},
            "cluster": {"kind": "local"},
            "snapshots": dict(snapshots),
            # Processes that are stopped for a block must not count as lost.
            "deadlines": {"heartbeat_s": 900.0, "control_s": 900.0, "collective_s": 900.0},
        }
    )


def _block_of_intervals(side: LiverRun, least_steps: int) -> Block:
    """Anew where the interval was changed meanwhile: there may be a snapshot less in it, or more.
    Raises DeadlineError where it changes again and again."""
    deadline = Deadline.after(SystemClock(), READY_S, "an interval between snapshots that stays")
    while True:
        every = told_intervals(side.run.path)[-1]
        block = _block(side, every * math.ceil(least_steps / every))
        if block.every_steps == every:
            return block
        deadline.check()


def _block(side: LiverRun, steps: int) -> Block:
    """From the end of one step to that of another; the one in which it was stopped is neither."""
    side.resume()
    begun = side.live.reach(side.live.reach(0) + 1)
    before_s = side.cpu_s()
    done = begun
    while done < begun + steps:
        done = side.live.reach(done + 1)
    cpu_s = side.cpu_s() - before_s
    side.pause()
    intervals = told_intervals(side.run.path)
    return Block(done - begun, cpu_s, intervals[-1] if intervals else math.nan)


def told_intervals(run_directory: Path) -> list[int]:
    """Steps from snapshot to snapshot as a worker has chosen them, in order: each of them chooses
    the same."""
    logs = sorted(run_directory.glob("logs/*.log"))
    found = (_EVERY.findall(path.read_text(errors="replace")) for path in logs)
    return next(([int(steps) for steps in each] for each in found if each), [])


def overhead_percent(blocks: Mapping[str, Sequence[Block]]) -> Spread:
    """CPU seconds a step with snapshots over those without, pair by pair."""
    pairs = zip(blocks[WITH], blocks[WITHOUT], strict=True)
    return Spread.of(
        [100 * (some.cpu_s_per_step / none.cpu_s_per_step - 1) for some, none in pairs]
    )
