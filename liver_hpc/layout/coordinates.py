"""Layouts: (tp, pp, dp) meshes, the coordinates in them, and which worker sits where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from liver_hpc.errors import ConfigError

_PART = re.compile(r"^(tp|pp|dp)=?(\d+)$")


class Coordinate(NamedTuple):
    """Where a worker sits in a layout; every axis counts from 0."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, order=True)
class Layout:
    """The sizes of the three mesh axes: tensor, pipeline and data parallelism."""

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp) < 1:
            raise ConfigError(f"layout {self}: every axis must be at least 1")

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads `tp=2,pp=1,dp=2` or `tp2 pp1 dp2`; an axis that is not named is 1."""
        sizes: dict[str, int] = {}
        for part in re.split(r"[,\s]+", text.strip()):
            match = _PART.match(part)
            if match is None or match[1] in sizes:
                raise ConfigError(f"layout {text!r}: wanted tp=A,pp=B,dp=C, got {part!r}")
            sizes[match[1]] = int(match[2])
        return cls(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1))

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates in rank order: tp fastest, then dp, then pp (Megatron's tp-dp-pp)."""
        for pp in range(self.pp):
            for dp in range(self.dp):
                for tp in range(self.tp):
                    yield Coordinate(tp, pp, dp)

    def rank(self, at: Coordinate) -> int:
        """Position of a coordinate in `coordinates()`."""
        return at.tp + self.tp * (at.dp + self.dp * at.pp)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate at a position; inverse of `rank`."""
        return Coordinate(rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp)


@dataclass(frozen=True)
class RankMap:
    """Which worker sits where: `workers[rank]` is the worker id at `layout.coordinate(rank)`."""

    layout: Layout
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.workers) != self.layout.workers or len(set(self.workers)) != len(self.workers):
            raise ConfigError(
                f"rank map: layout {self.layout} wants {self.layout.workers} different workers, "
                f"got {list(self.workers)}"
            )

    def worker_at(self, at: Coordinate) -> int:
        return self.workers[self.layout.rank(at)]

    def coordinate_of(self, worker: int) -> Coordinate | None:
        """Where a worker sits; None when it is not in this rank map."""
        rank = self._ranks.get(worker)
        return None if rank is None else self.layout.coordinate(rank)

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return dict(zip(self.workers, range(len(self.workers)), strict=True))

    def __str__(self) -> str:
        return f"{self.layout} on workers {','.join(map(str, self.workers))}"
