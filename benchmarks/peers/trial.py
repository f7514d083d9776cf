"""One trial: a job of one system, all events that it knows, one after the other."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.live_runs import LiveRun
from benchmarks.models import MODEL_25M, text_data
from benchmarks.peers.events import JOIN, LEAVE, cost_of
from benchmarks.peers.inprocess_job import InprocessJob
from benchmarks.peers.jobs import PeerJob
from benchmarks.peers.torchft_job import TorchftJob
from benchmarks.peers.torchrun_job import TorchrunJob
from liver_hpc.cli.submission import checked_run, with_prepared_data
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.report.derive import run_figures

LIVE = "live"
BYTES_PER_PARAMETER = 12  # fp32: the parameter, and Adam's two moments


@dataclass(frozen=True)
class Effort:
    """How much is measured; quick: a model that steps in milliseconds. events: of the peers."""

    repeats: int = 5
    settle_steps: int = 5
    event_s: float = 90.0
    events: tuple[str, ...] = (JOIN, LEAVE)
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL_25M)


QUICK = Effort(
    repeats=1,
    settle_steps=3,
    event_s=60.0,
    model={"layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "seq_length": 32},
)


@dataclass(frozen=True)
class Row:
    """One line of the table. Without a measurement its numbers are NaN and `detail` says why.

    swap_s: of the refit and of our transfer beside it, for which nothing trains.
    """

    system: str
    event: str
    workers: str = ""
    state_bytes: int = 0
    lost_s: float = math.nan
    slowdown_s: float = math.nan
    notice_to_first_step_s: float = math.nan
    steps_again: int = 0
    swap_s: float = math.nan
    detail: str = ""

    @property
    def cost_s(self) -> float:
        """All that the change has taken from training."""
        return self.lost_s + self.slowdown_s


@dataclass(frozen=True)
class Peer:
    """A system. module: what must be importable, and `package` brings it; None: nothing."""

    job: type[PeerJob]
    module: str | None = None
    package: str = ""

    def why_not(self) -> str | None:
        """Why it cannot be tried here; None where it can."""
        if self.module is None or find_spec(self.module) is not None:
            return None
        return f"not installed: pip install {self.package}, or the extra bench"


PEERS = {
    "torchrun": Peer(TorchrunJob),
    "torchft": Peer(TorchftJob, "torchft", "torchft"),
    "inprocess": Peer(InprocessJob, "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
}


@dataclass(frozen=True)
class Trial:
    """A row an event, in their order; losses: by step."""

    rows: Sequence[Row]
    losses: Mapping[int, float] = field(default_factory=dict)


def try_peer(name: str, effort: Effort, directory: Path) -> Trial:
    """Raises LiverError when an event does not complete."""
    config = prepared(effort, directory)
    kind = PEERS[name].job
    with tempfile.TemporaryDirectory(dir=directory) as own:
        (Path(own) / "run.yaml").write_text(dump_run(config), encoding="utf-8")
        recipe = load_run_recipe(config, Path(own))
        with kind(Path(own), effort.event_s) as job:
            job.begin()
            workers, changes = kind.first_workers, []
            for event in (event for event in kind.events if event in effort.events):
                job.settle(workers, effort.settle_steps)
                changes.append(job.change(event, workers, effort.settle_steps))
                workers = changes[-1].target
            steps = job.steps()
    rows = []
    for change in changes:
        cost = cost_of(steps, change)
        rows.append(
            Row(
                system=name,
                event=change.event,
                workers=f"{change.source} -> {change.target}",
                state_bytes=state_bytes(recipe),
                lost_s=cost.lost_s,
                slowdown_s=cost.slowdown_s,
                notice_to_first_step_s=cost.notice_to_first_step_s,
                steps_again=cost.steps_again,
                detail=f"median step {cost.median_step_s:.3g} s"
                + (f", {cost.steps_between} steps while healing" if cost.steps_between else ""),
            )
        )
    return Trial(rows, {step.step: step.loss for step in steps})


def try_live(effort: Effort, directory: Path) -> Trial:
    """The same by live handoff. Raises LiverError when one does not complete."""
    config = prepared(effort, directory)
    with LiveRun(config, effort.event_s) as run:
        run.settle(effort.settle_steps)
        for workers in (2, 1):
            run.resize(Layout(1, 1, workers))
            run.await_handoffs()
            run.settle(effort.settle_steps)
    recipe = load_run_recipe(config, run.run.path)
    figures = run_figures(run.records())
    medians = {world.generation: world.median_step_s for world in figures.generations}
    done = [one for one in figures.reconfigurations if one.completed]
    if len(done) != 2:
        raise LiverError(f"wanted 2 handoffs, got {len(done)}")
    rows = [
        Row(
            system=LIVE,
            event=event,
            workers=workers,
            state_bytes=state_bytes(recipe),
            lost_s=one.lost_s,
            slowdown_s=one.slowdown_s,
            notice_to_first_step_s=one.reconfiguration_s,
            detail=f"median step {medians[one.generation]:.3g} s",
        )
        for event, workers, one in zip((JOIN, LEAVE), ("1 -> 2", "2 -> 1"), done, strict=True)
    ]
    return Trial(rows)


def prepared(effort: Effort, directory: Path) -> RunConfig:
    """The run that everybody trains; its data lies under `directory`."""
    config = RunConfig.model_validate(
        {
            "name": "peers",
            "runs_directory": str(directory / "runs"),
            "model": dict(effort.model),
            "data": text_data(directory),
            "train": {"steps": 1_000_000, "global_batch": 4, "micro_batch": 1},
            "schedule": {"style": "constant", "warmup_steps": 0},
            "workers": {"initial": 1, "max": 2},
            "layouts": {1: [{"dp": 1}], 2: [{"dp": 2}, {"tp": 2}]},  # the second for the refit
            "cluster": {"kind": "local"},
        }
    )
    return with_prepared_data(checked_run(config, "local")[0])


def state_bytes(recipe: Recipe) -> int:
    """Of the whole training state, once."""
    return BYTES_PER_PARAMETER * sum(tensor.elements for tensor in recipe.spec.tensors)
