"""The time of a step of data parallelism, fitted to measured ones, and what follows from it.

    step(n workers, M micro-batches) = fixed + 2 (n - 1) / n reduce + each ceil(M / n)

fixed: what every step costs. reduce: the reduction of all gradients between two workers, of which
a ring of n workers takes 2 (n - 1) / n. each: one micro-batch, on a worker beside which others
compute; a lone one has the memory's bandwidth for itself. All in seconds; the worker that computes
most sets the pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from liver_hpc.errors import LiverError


class Cell(NamedTuple):
    """One world: workers of data parallelism, and the micro-batches of its global batch."""

    workers: int
    micro_batches: int

    @property
    def name(self) -> str:
        return f"dp{self.workers}, {self.micro_batches} micro-batches"

    @property
    def most(self) -> int:
        """Micro-batches of the worker that computes most."""
        return math.ceil(self.micro_batches / self.workers)

    @property
    def even(self) -> bool:
        return self.micro_batches % self.workers == 0


@dataclass(frozen=True)
class StepModel:
    """See above; in seconds. alone_s: a micro-batch on a lone worker."""

    fixed_s: float
    reduce_s: float
    each_s: float
    alone_s: float

    @classmethod
    def fitted(cls, steps_s: Mapping[Cell, float]) -> StepModel:
        """A line through the even worlds of one worker, and one through those of two; see `_line`.
        Raises LiverError without two of each."""
        alone, beside = (
            {cell: s for cell, s in steps_s.items() if cell.even and cell.workers == workers}
            for workers in (1, 2)
        )
        if min(len(alone), len(beside)) < 2:
            raise LiverError(
                f"the fit wants two even worlds of one worker and two of two; got {[*steps_s]}"
            )
        (fixed_s, alone_s), (both_s, each_s) = _line(alone), _line(beside)
        return cls(fixed_s, max(0.0, both_s - fixed_s), each_s, alone_s)

    def step_s(self, cell: Cell) -> float:
        each_s = self.alone_s if cell.workers == 1 else self.each_s
        ring = 2 * (cell.workers - 1) / cell.workers
        return self.fixed_s + ring * self.reduce_s + each_s * cell.most

    def throughput(self, workers: int, of: int, micro_batches: int) -> float:
        """Samples a second of some workers over those of `of` workers, of the same batch."""
        all_s = self.step_s(Cell(of, micro_batches))
        return all_s / self.step_s(Cell(workers, micro_batches))


def _line(steps_s: Mapping[Cell, float]) -> tuple[float, float]:
    """What every step costs, and each micro-batch: not negative, and so that the predictions have
    the least squared relative errors."""
    measured_s = np.array([*steps_s.values()])
    rows = np.array([(1.0, cell.most) for cell in steps_s]) / measured_s[:, None]
    (fixed_s, each_s), _ = nnls(rows, np.ones(len(rows)))
    return float(fixed_s), float(each_s)


def ideal(workers: int, of: int, micro_batches: int) -> float:
    """The throughput if a step took the time of its micro-batches alone."""
    return Cell(of, micro_batches).most / Cell(workers, micro_batches).most
