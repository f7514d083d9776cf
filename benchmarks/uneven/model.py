"""The time of a step of data parallelism, fitted to measured ones, and what follows from it.

    step(n workers, M micro-batches) = fixed + 2 (n - 1) / n reduce + each ceil(M / n)

fixed: what every step costs. reduce: the reduction of all gradients between two workers, of which
a ring of n workers takes 2 (n - 1) / n. each: one micro-batch. All in seconds; the worker that
computes most sets the pace.
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
    def most(self) -> int:
        """Micro-batches of the worker that computes most."""
        return math.ceil(self.micro_batches / self.workers)

    @property
    def even(self) -> bool:
        return self.micro_batches % self.workers == 0


@dataclass(frozen=True)
class StepModel:
    """See above; in seconds."""

    fixed_s: float
    reduce_s: float
    each_s: float

    @classmethod
    def fitted(cls, steps_s: Mapping[Cell, float]) -> StepModel:
        """The model whose predictions have the least squared relative errors; none of its parts is
        negative. Raises LiverError without even worlds of one worker and of two."""
        even = {cell: step_s for cell, step_s in steps_s.items() if cell.even}
        if {cell.workers for cell in even} != {1, 2} or len({cell.most for cell in even}) < 2:
            raise LiverError(
                f"the fit wants even worlds of one worker and of two; got {sorted(even)}"
            )
        rows = np.array([_terms(cell) for cell in even])
        measured_s = np.array(list(even.values()))
        weights, _ = nnls(rows / measured_s[:, None], np.ones(len(even)))
        return cls(*map(float, weights))

    def step_s(self, cell: Cell) -> float:
        parts = zip(_terms(cell), (self.fixed_s, self.reduce_s, self.each_s), strict=True)
        return sum(term * seconds for term, seconds in parts)

    def throughput(self, workers: int, of: int, micro_batches: int) -> float:
        """Samples a second of some workers over those of `of` workers, of the same batch."""
        all_s = self.step_s(Cell(of, micro_batches))
        return all_s / self.step_s(Cell(workers, micro_batches))


def _terms(cell: Cell) -> tuple[float, float, float]:
    return 1.0, 2 * (cell.workers - 1) / cell.workers, float(cell.most)


def ideal(workers: int, of: int, micro_batches: int) -> float:
    """The throughput if a step took the time of its micro-batches alone."""
    return Cell(of, micro_batches).most / Cell(workers, micro_batches).most
