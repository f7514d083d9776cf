"""The words of an examination: what is examined, what a check is, how its result reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar

from liver_hpc.cluster.slurm.commands import PartitionInfo, SlurmCommands
from liver_hpc.config.schema import RunConfig, SlurmSection
from liver_hpc.errors import LiverError
from liver_hpc.recipes.specs import Derive, derive_spec

NAME_WIDTH = 16

Context = TypeVar("Context")


@dataclass(frozen=True)
class Order:
    """What is to be examined: what a run wants of a cluster, and which nodes to try it on.

    nodes: how many; 0: none, or those of the job around this process. account: beats the run's.
    grant_s: the longest wait for them, in seconds. derive: how the spec of a run's model is found.
    """

    config: RunConfig
    nodes: int = 0
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | str = 0
    grant_s: float = 120.0
    derive: Derive = derive_spec
    commands: SlurmCommands = field(
        default_factory=lambda: SlurmCommands(command_s=20.0, unreachable_s=0.0)
    )

    @cached_property
    def partitions(self) -> dict[str, PartitionInfo]:
        return self.commands.partitions()

    def partitions_of(self, names: str | None) -> list[PartitionInfo]:
        """Those that a job may come to which names one, several with commas between, or none."""
        if names is None:
            return [one for one in self.partitions.values() if one.default]
        return [self.partitions[name] for name in names.split(",")]

    @property
    def runs_directory(self) -> Path:
        return self.config.runs_directory.expanduser().absolute()

    @property
    def slurm(self) -> SlurmSection:
        return self.config.cluster.slurm


class Level(StrEnum):
    PASS = "PASS"
    WARN = "WARN"  # a run works, but not as well as it could
    FAIL = "FAIL"  # a run would not work
    SKIP = "SKIP"  # not looked at, and why


@dataclass(frozen=True)
class Result:
    """What was found, and for WARN and FAIL what to do about it."""

    level: Level
    found: str
    advice: str = ""

    def line(self, check: str) -> str:
        advice = f"; do: {self.advice}" if self.advice else ""
        found = " ".join(f"{self.found}{advice}".split())
        return f"{self.level:<4}  {check:<{NAME_WIDTH}}  {found}"


passed = partial(Result, Level.PASS)
warned = partial(Result, Level.WARN)
failed = partial(Result, Level.FAIL)
skipped = partial(Result, Level.SKIP)


@dataclass(frozen=True)
class Check(Generic[Context]):
    """One row of a table of checks: what it looks at, and which others must not have failed.

    advice: what to do when it could not even look, a LiverError.
    """

    name: str
    look: Callable[[Context], Result]
    needs: tuple[str, ...] = ()
    advice: str = ""


@dataclass
class Examination:
    """Checks one after the other; what a failed one stands in the way of is skipped. tell: hears
    of each check what it has found, at once."""

    tell: Callable[[str, Result], None]
    obstacles: dict[str, str] = field(default_factory=dict)
    """What became of the checks that stand in the way of others."""

    def run(self, checks: Sequence[Check[Context]], context: Context) -> None:
        for check in checks:
            result = self.obstacle(check.needs)
            if result is not None:
                self.obstacles[check.name] = "was not made"
            else:
                try:
                    result = check.look(context)
                except LiverError as error:
                    result = failed(str(error), check.advice)
                if result.level is Level.FAIL:
                    self.obstacles[check.name] = "failed"
            self.tell(check.name, result)

    def obstacle(self, needs: Sequence[str]) -> Result | None:
        """Why something that needs these checks cannot be done; None when it can."""
        for name in needs:
            if name in self.obstacles:
                return skipped(f"needs the check of {name}, which {self.obstacles[name]}")
        return None
