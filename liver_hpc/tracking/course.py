"""The course of a run as trackers are told it: of each entry of the journal. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.report.events import recorded
from liver_hpc.report.store import RecordsFold
from liver_hpc.run.entries import COORDINATOR_STARTED, STEP_DONE, Entry
from liver_hpc.tracking.base import LOSS, Mark, Point

RECIPES = "metrics/"
"""Before the name of each metric of the recipe."""
UNTOLD = ("metrics", "traffic", "worker_phases", "crossings")
"""Tables of which no tracker is told anything. Of a thousand workers each handoff has megabytes."""


class Course:
    """fold: what is recorded so far, but for `UNTOLD`. step: how many steps are done. place: of the
    last one on an axis that only goes forward: its number, or behind the one before where steps are
    done again. workers: of the world that trains, 0 while none does."""

    def __init__(self) -> None:
        self.fold = RecordsFold(leaves_out=UNTOLD)
        self.step = 0
        self.place = 0
        self.workers = 0

    @property
    def now(self) -> Mapping[str, float]:
        """What is so beside all steps, by the names of the values that steps have of it."""
        return {"run/workers": self.workers, "run/nodes": self.fold.held.nodes}

    def take(self, entry: Entry) -> Iterator[Point | Mark]:
        """What follows from an entry. Raises ConfigError for one that cannot be understood."""
        self.fold.take(entry)
        try:
            yield from self._points(entry)
            for kind, text in self._marks(entry):
                yield Mark(self.step, entry.at_s, kind, text)
            if any(map(_ends_a_world, (entry.event, *entry.actions))):
                self.workers = 0
        except (KeyError, TypeError) as error:
            raise ConfigError(f"entry {entry.number}: {error}") from error

    def _points(self, entry: Entry) -> Iterator[Point]:
        event, held = entry.event, self.fold.held
        match event["type"]:
            case str(kind) if kind == STEP_DONE:
                self.step = event["step"] + 1
                self.workers = held.workers_of(event["generation"])
                took_s = event["ended_s"] - event["started_s"]
                values = {
                    LOSS: float(event["loss"]),
                    "train/grad_norm": float(event["grad_norm"]),
                    "train/learning_rate": float(event["learning_rate"]),
                    "train/step_s": took_s,
                    "train/tokens_per_s": event["tokens"] / took_s if took_s > 0 else math.nan,
                    **self.now,
                }
                told = event.get("metrics", {})
                values |= {f"{RECIPES}{name}": float(value) for name, value in told.items()}
                self.place = max(self.place + 1, self.step)
                yield Point(self.step, event["ended_s"], values)
            case "evaluated":
                values = {"validation/loss": float(event["loss"])}
                yield Point(event["step"], event["ended_s"], values)
            case "checkpoint_written":
                values = {
                    "checkpoint/step": event["step"],
                    "checkpoint/took_s": float(event["took_s"]),
                }
                yield Point(self.step, entry.at_s, values)
            case str(kind) if kind == COORDINATOR_STARTED and (resumed := event.get("resumed")):
                self.step = resumed["step"]
                if not resumed["weights"]:
                    yield Point(self.step, entry.at_s, {"checkpoint/step": self.step})

    def _marks(self, entry: Entry) -> Iterator[tuple[str, str]]:
        """Kind and text of each."""
        event = entry.event
        match event["type"]:
            case str(kind) if kind == COORDINATOR_STARTED and event.get("resumed"):
                yield "run", f"goes on from the checkpoint of step {self.step}"
            case "took_over":
                yield "run", f"coordinator {event['epoch']} took over"
            case "checkpoint_failed":
                yield "checkpoint", event["reason"]
        for action in entry.actions:
            for told in recorded(action, entry.at_s, self.step):
                if told.kind in _MARKED:
                    yield _MARKED[told.kind], told.text
            if action["type"] == "end":
                yield "run", f"{action['state']}: {action['reason']}"


def _ends_a_world(said: Mapping[str, Any]) -> bool:
    """Whether none trains after this event or action."""
    halts = said["type"] == "send" and said["message"]["type"] == "halt"
    return halts or said["type"] in (COORDINATOR_STARTED, "end")


_MARKED = {"reconfiguration": "handoff", "recovery": "recovery", "notice": "notice"}
"""Events of `report.events` that are marks, and what these are called."""
