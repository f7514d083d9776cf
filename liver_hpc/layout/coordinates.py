"""Layouts: sizes of the mesh axes, the coordinates in them, and which worker sits where."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from liver_hpc.errors import ConfigError

SEQUENCE_PARALLEL = "sp"
_PART = re.compile(r"^(tp|pp|dp|cp|ep|vpp)=?(\d+)$")
_RUNS_TOLD = 32  # of workers, in a line


class Coordinate(NamedTuple):
    """Where a worker sits in a layout; every axis counts from 0.

    replica: which of the workers that hold the same dense parameters: data-parallel and
    context-parallel ranks in one (Megatron's dp_cp), those of context parallelism next to each
    other.
    """

    tp: int
    pp: int
    replica: int


@dataclass(frozen=True, order=True)
class Layout:
    """The sizes of the mesh axes, and what goes with them.

    tp, pp, dp, cp: tensor, pipeline, data and context parallelism, whose product is the number of
    workers. ep: expert parallelism, over neighbouring replicas. vpp: model chunks on each stage of
    an interleaved pipeline. sequence_parallel: between tensor-parallel regions, each tp rank has
    its share of the sequence.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.cp, self.ep, self.vpp) < 1:
            raise ConfigError(f"layout {self}: every axis must be at least 1")
        if self.replicas % self.ep:
            raise ConfigError(f"layout {self}: ep must divide dp x cp, which is {self.replicas}")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"layout {self}: an interleaved pipeline wants pp of at least 2")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(f"layout {self}: sequence parallelism wants tp of at least 2")

    @property
    def replicas(self) -> int:
        """Workers that hold the same dense parameters: Megatron's dp_cp."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Workers that hold the same experts: Megatron's expt_dp, as expert tp is tp."""
        return self.replicas // self.ep

    @property
    def split(self) -> tuple[int, ...]:
        """What says which parameters a worker has: all axes but dp and cp."""
        return self.tp, self.pp, self.vpp, self.ep

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def least(self) -> Layout:
        """The smallest layout in which each worker's model is the same as in this one."""
        return replace(self, dp=self.ep // math.gcd(self.ep, self.cp))

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        sizes |= {name: size for name in ("cp", "ep", "vpp") if (size := getattr(self, name)) != 1}
        words = [f"{name}{size}" for name, size in sizes.items()]
        return " ".join([*words, *([SEQUENCE_PARALLEL] if self.sequence_parallel else [])])

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads `tp=2,pp=1,dp=2` or `tp2 pp1 dp2 sp`; an axis that is not named is 1."""
        sizes: dict[str, int] = {}
        shares_sequence = False
        for part in re.split(r"[,\s]+", text.strip()):
            match = _PART.match(part)
            if part == SEQUENCE_PARALLEL and not shares_sequence:
                shares_sequence = True
            elif match is None or match[1] in sizes:
                raise ConfigError(
                    f"layout {text!r}: wanted tp=A,pp=B,dp=C, and maybe cp=, ep=, vpp=, sp; "
                    f"got {part!r}"
                )
            else:
                sizes[match[1]] = int(match[2])
        return cls(**({"tp": 1, "pp": 1, "dp": 1} | sizes), sequence_parallel=shares_sequence)

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates in rank order: tp fastest, then cp, dp, pp (Megatron's tp-cp-dp-pp)."""
        for pp in range(self.pp):
            for replica in range(self.replicas):
                for tp in range(self.tp):
                    yield Coordinate(tp, pp, replica)

    def rank(self, at: Coordinate) -> int:
        """Position of a coordinate in `coordinates()`."""
        return at.tp + self.tp * (at.replica + self.replicas * at.pp)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate at a position; inverse of `rank`."""
        stage = self.tp * self.replicas
        return Coordinate(rank % self.tp, rank // stage, rank // self.tp % self.replicas)

    def cp_rank(self, at: Coordinate) -> int:
        return at.replica % self.cp

    def dp_rank(self, at: Coordinate) -> int:
        """Which share of the global batch a coordinate computes."""
        return at.replica // self.cp

    def ep_rank(self, at: Coordinate) -> int:
        """Which of the experts a coordinate holds."""
        return at.replica % self.ep


@dataclass(frozen=True)
class RankMap:
    """Which worker sits where: `workers[rank]` is the worker id at `layout.coordinate(rank)`.

    nodes: the number of each rank's node, the same in all rank maps of a run; empty: each worker is
    alone on one.
    """

    layout: Layout
    workers: tuple[int, ...]
    nodes: tuple[int, ...] = field(default=(), compare=False)  # workers stay on their nodes

    def __post_init__(self) -> None:
        if self.nodes and len(self.nodes) != len(self.workers):
            raise ConfigError(
                f"rank map: {len(self.workers)} workers, but {len(self.nodes)} nodes of workers"
            )
        if len(self.workers) != self.layout.workers or len(set(self.workers)) != len(self.workers):
            raise ConfigError(
                f"rank map: layout {self.layout} wants {self.layout.workers} different workers, "
                f"got {list(self.workers)}"
            )

    def worker_at(self, at: Coordinate) -> int:
        return self.workers[self.layout.rank(at)]

    def __contains__(self, worker: int) -> bool:
        """Whether a worker has a seat."""
        return worker in self._ranks

    def coordinate_of(self, worker: int) -> Coordinate | None:
        """Where a worker sits; None when it is not in this rank map."""
        rank = self._ranks.get(worker)
        return None if rank is None else self.layout.coordinate(rank)

    def node_at(self, at: Coordinate) -> int:
        rank = self.layout.rank(at)
        return self.nodes[rank] if self.nodes else alone(self.workers[rank])

    def on_node(self, node: int) -> tuple[Coordinate, ...]:
        """The coordinates of a node's workers, by rank."""
        return tuple(map(self.layout.coordinate, self._ranks_on.get(node, ())))

    @cached_property
    def _ranks_on(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes or map(alone, self.workers)):
            found.setdefault(node, []).append(rank)
        return found

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return dict(zip(self.workers, range(len(self.workers)), strict=True))

    def __str__(self) -> str:
        return f"{self.layout} on workers {_ids(self.workers)}"


def ids_text(workers: Iterable[int]) -> str:
    """`0-3, 7` for workers 0, 1, 2, 3 and 7; of more than 32 such runs the first, and how many
    workers more."""
    return _ids(sorted(workers)) or "none"


def _ids(workers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for worker in workers:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    told, rest = runs[:_RUNS_TOLD], runs[_RUNS_TOLD:]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in told]
    more = [f"and {sum(map(len, rest))} more"] if rest else []
    return ", ".join([*parts, *more])


def alone(worker: int) -> int:
    """The number of the node of a worker of which no node is known."""
    return -1 - worker
