"""Weights & Biases: one run id for as long as the run directory lives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import wandb

from liver_hpc.config.schema import WandbSection
from liver_hpc.tracking.base import Mark, Point, Tracker

INIT_S = 20.0
"""So long its server may take to answer at the start."""
STEP = "step"
"""The axis of all values. W&B's own only goes forward."""
COLUMNS: list[str | int] = ["step", "time", "kind", "what"]


class WeightsAndBiases(Tracker):
    """A step that is done again is told again: the first time may have been without a loss, or a
    wrong one. Marks are counted in the summary, and a table at the end has them all."""

    def __init__(
        self,
        section: WandbSection,
        directory: Path,
        run_id: str,
        facts: dict[str, Any],
        before: list[Mark],
        at: tuple[int, int],
    ) -> None:
        """The key and the mode are those of the environment. facts: of the run, for its page.
        before: marks that were told. at: the last step that was told, and its place (`Course`)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            id=run_id,
            name=run_id,
            dir=directory,
            config=facts,
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_S,
                # What it finds out by itself of this host, its packages and the user's repository.
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._marks = list(before)
        self._counts = Counter(f"events/{mark.kind}" for mark in before)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._step, self._place = at

    def take(self, what: Point | Mark) -> None:
        if isinstance(what, Mark):
            self._marks.append(what)
            self._counts[f"events/{what.kind}"] += 1
            self._run.summary.update(dict(self._counts))
            self._run.summary["events/last"] = f"step {what.step}: {what.text}"
            return
        if what.is_step or what.step > self._place:
            self._step, self._place = what.step, max(self._place + what.is_step, what.step)
        if what.step == self._step:
            self._run.log({STEP: what.step, **what.values}, step=self._place)

    def flush(self) -> None:
        """Its own process sends, or writes, what it was told."""

    def close(self) -> None:
        rows = [[mark.step, mark.at_s, mark.kind, mark.text] for mark in self._marks]
        if rows:
            self._run.log({"events": wandb.Table(columns=COLUMNS, data=rows)})
        self._run.finish()
        wandb.teardown()  # once its own process has ended, the files are whole
