"""torchft beside it: the last of two replica groups is killed, of the same model and batch."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.events import KILL, Change, Step, settled
from benchmarks.peers.torchft_job import TorchftJob
from benchmarks.peers.torchft_settings import HEARTBEAT_TIMEOUT_MS
from benchmarks.peers.trial import PEERS
from liver_hpc.cli.submission import checked_run, with_prepared_data
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.recipes.specs import load_run_recipe

METHOD = (
    "torchft 0.2, DDP over gloo, every replica with the whole optimizer; worker of dp2 alone, as "
    "it knows no tensor parallelism inside a change; from the signal to the end of the first step "
    "of the one that is left, less a median step of it. Its lighthouse misses a heartbeat after "
    f"{HEARTBEAT_TIMEOUT_MS} ms (default 5000)"
)


def why_not() -> str | None:
    """Why it cannot be tried here; None where it can."""
    return PEERS["torchft"].why_not()


def lose(
    config: RunConfig, directory: Path, warm_steps: int, after_steps: int, limit_s: float
) -> float:
    """What a kill takes of training, s. Raises LiverError where the other does not go on,
    DeadlineError where that takes too long."""
    config = with_prepared_data(checked_run(config, "local")[0])
    with tempfile.TemporaryDirectory(dir=directory) as name:
        own = Path(name)
        (own / "run.yaml").write_text(dump_run(config), encoding="utf-8")
        load_run_recipe(config, own)  # its spec is there before the workers want it
        with TorchftJob(own, limit_s) as job:
            job.begin()
            job.add()
            job.settle(2, warm_steps)
            change = job.change(KILL, 2, after_steps)
            return lost_s(job.steps(), change)


def lost_s(steps: Sequence[Step], change: Change) -> float:
    """Of steps and a kill between them; the new world has done two steps at least."""
    first, *later = settled(steps, change)
    median_s = statistics.median(step.ended_s - step.started_s for step in later)
    return first.ended_s - change.noticed_s - median_s
