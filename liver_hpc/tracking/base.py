"""What a tracker is told of a run, and which package each of them wants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from liver_hpc.config.schema import TrackingSection

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "openmetrics": "prometheus_client"}
"""What each tracker is written with; an extra of this package has its name."""

LOSS = "train/loss"

HAS_FAILED = "tracking has failed: "
"""So the process begins its last words."""

SHARE = 20.0
"""Figures are as old as this many times what deriving them takes."""


@dataclass(frozen=True)
class Point:
    """Values at one place of the course of training. step: how many steps are done. at_s: epoch
    seconds."""

    step: int
    at_s: float
    values: Mapping[str, float]

    @property
    def is_step(self) -> bool:
        """Whether it tells of a training step; others stand beside one."""
        return LOSS in self.values


@dataclass(frozen=True)
class Mark:
    """Something that happened. kind: "handoff", "recovery", "notice", "checkpoint", of one that has
    failed, or "run"."""

    step: int
    at_s: float
    kind: str
    text: str


class Tracker(ABC):
    """Takes what happens in the order of the journal; one thread calls it. All methods may raise
    whatever the library behind it raises: a tracker that fails is not called again."""

    keeps: ClassVar[bool] = True
    """Whether what it was told is still there when the next process goes on with it."""

    @abstractmethod
    def take(self, what: Point | Mark) -> None:
        """Not before `flush` is it safe."""

    @abstractmethod
    def flush(self) -> None:
        """What was taken is where it belongs, as far as that is known."""

    @abstractmethod
    def close(self) -> None:
        """Flushes."""


def wanted_by(section: TrackingSection) -> list[str]:
    """The names of the trackers that a run file asks for."""
    return [name for name in PACKAGES if getattr(section, name) is not None]


def missing_packages(section: TrackingSection) -> Iterator[str]:
    """Why a tracker cannot be had in this environment, one line each."""
    for name in wanted_by(section):
        if find_spec(PACKAGES[name]) is None:
            yield (
                f"tracking.{name}: this Python lacks the package {PACKAGES[name]}; "
                f"pip install 'liver_hpc[{name}]'"
            )
