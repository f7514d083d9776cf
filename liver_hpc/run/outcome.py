"""The coordinator's files in the run directory, and the log with its identity on every line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from liver_hpc.config.schema import RunConfig
from liver_hpc.host.files import write_whole

COORDINATOR_FILE = "coordinator.json"
OUTCOME_FILE = "outcome.json"
AGAIN_FILE = "again"
"""Says that a run that had ended is to begin again, until it does."""
WORLD_FILE = "world.json"
REQUEUE = "requeue"
OPERATORS_STOP = "an operator's request"
TOO_FEW_NODES = "no nodes for "
TOO_LITTLE_TIME = "its job's time was up before training began"
PREEMPTED = "preempted"


@dataclass(frozen=True)
class Outcome:
    """How a coordinator ended, and its run with it unless that goes on. step: steps done.

    state: "finished", "stopped", "failed"; "restart" and "requeue": the run goes on from the state
    on disk, in the same job or when its job is queued again.
    """

    state: str
    reason: str
    step: int

    def __str__(self) -> str:
        """`stopped at step 12: asked to`."""
        text = f"{self.state} at step {self.step}"
        return f"{text}: {self.reason}" if self.reason else text

    def goes_on(self, config: RunConfig) -> bool:
        """Whether the run goes on in the job that is queued again."""
        return self.state == REQUEUE and bool(config.cluster.slurm.requeue)

    @property
    def is_last(self) -> bool:
        """Whether the run does not go on by itself, whoever starts its job again: it is done, or an
        operator has ended it."""
        asked = self.state == "stopped" and self.reason.startswith(OPERATORS_STOP)
        return self.state == "finished" or asked

    def write(self, run_directory: Path) -> None:
        write_private_json(run_directory / OUTCOME_FILE, asdict(self))


def begin_again(run_directory: Path) -> None:
    """The next coordinator of a run that has ended begins it again."""
    (run_directory / AGAIN_FILE).touch(mode=0o600)
    (run_directory / OUTCOME_FILE).unlink(missing_ok=True)


@dataclass(frozen=True)
class WorldNote:
    """The world that trains, or that trained last; there is none while a start of the run has not
    trained yet. What `liver list` tells of a run without its journal. workers: how many. step: how
    many of the run's `steps` were done when it began, at `since_s` (epoch). cluster: "local" or
    "slurm".
    """

    generation: int
    layout: str
    workers: int
    step: int
    steps: int
    since_s: float
    cluster: str

    def write(self, run_directory: Path) -> None:
        write_whole(run_directory / WORLD_FILE, json.dumps(asdict(self)) + "\n", mode=0o600)


def write_private_json(path: Path, data: dict[str, Any]) -> None:
    """Writes the file whole or not at all, for its owner's eyes only (mode 0600)."""
    write_whole(path, json.dumps(data) + "\n", mode=0o600, sync=True)


class _Log(logging.FileHandler):
    """Lines that it cannot write are lost without a word: the journal says of a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def open_log(path: Path, identity: Callable[[], str]) -> logging.Handler:
    """A handler for the package's log lines, each with the identity of the moment."""
    path.parent.mkdir(exist_ok=True)
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s [%(identity)s] %(levelname)s %(message)s"))

    def add_identity(record: logging.LogRecord) -> bool:
        record.identity = identity()
        return True

    handler.addFilter(add_identity)
    return handler
