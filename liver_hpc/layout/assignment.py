"""Which bin each unit goes to, so that the most is gained: exactly, also for thousands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array, csr_array, vstack

from liver_hpc.errors import PlanError

DENSE_PAIRS = 512 * 512
"""Up to so many pairs of a unit and a slot are looked at one by one."""


@dataclass(frozen=True)
class Problem:
    """Units, and bins with some slots each, of which a unit takes one.

    kinds: of each unit; sorts: of each bin; all by number. own: [bins, units], what a unit gains in
    a bin, with entries where it is not 0, all positive; shared: [sorts, kinds], what any unit of a
    kind gains in any bin of a sort beside that. slots: of each bin.
    """

    kinds: NDArray[np.int64]
    sorts: NDArray[np.int64]
    slots: NDArray[np.int64]
    own: csr_array | NDArray[np.float64]
    shared: NDArray[np.float64]

    def solve(self) -> list[int | None]:
        """The bin of each unit; None for those that are left over.

        As many units as there are slots get one, and together they gain the most. Where it makes
        no difference, the first units get the first bins. Deterministic.
        """
        units, slots = len(self.kinds), int(self.slots.sum())
        if not units or not slots:
            return [None] * units
        chosen = self._pair_by_pair() if units * slots <= DENSE_PAIRS else self._by_flows()
        return self._in_order(chosen)

    def _pair_by_pair(self) -> list[int | None]:
        bins = np.repeat(np.arange(len(self.slots)), self.slots)
        own = self.own.toarray() if isinstance(self.own, csr_array) else self.own
        gains = own[bins] + self.shared[np.ix_(self.sorts[bins], self.kinds)]
        rows, columns = linear_sum_assignment(gains, maximize=True)
        chosen: list[int | None] = [None] * len(self.kinds)
        for row, column in zip(rows, columns, strict=True):
            chosen[column] = int(bins[row])
        return chosen

    def _by_flows(self) -> list[int | None]:
        """As a transport problem, whose edges are the pairs that `own` has, and for the rest those
        of sorts and kinds that have something in common: with experts there may be a thousand of
        either. Each row below sums within another one's, or they have nothing in common, so the
        corners of the feasible region are whole numbers. Units that gain nothing get what is left.
        """
        direct = coo_array(self.own)
        at, unit = direct.coords
        sort, kind = np.nonzero(self.shared)
        gains = np.concatenate(
            [direct.data + self.shared[self.sorts[at], self.kinds[unit]], self.shared[sort, kind]]
        )
        if not len(gains):
            return self._filled([None] * len(self.kinds))
        none, edges = np.empty(0, dtype=np.int64), len(unit)
        every = np.arange(len(gains))

        def rows(direct_row: NDArray[np.int64], rest: NDArray[np.int64], count: int) -> csr_array:
            row = np.concatenate([direct_row, rest])
            of = every[:edges] if not len(rest) else every
            return csr_array(coo_array((np.ones(len(row)), (row, of)), (count, len(gains))))

        sorts, kinds = self.shared.shape
        most = [
            (rows(unit, none, len(self.kinds)), np.ones(len(self.kinds))),
            (rows(self.kinds[unit], kind, kinds), np.bincount(self.kinds, minlength=kinds)),
            (rows(at, none, len(self.slots)), self.slots),
            (rows(self.sorts[at], sort, sorts), np.bincount(self.sorts, self.slots, sorts)),
        ]
        found = linprog(
            -gains / max(gains.max(), 1.0),
            A_ub=vstack([matrix for matrix, _ in most]),
            b_ub=np.concatenate([limit for _, limit in most]),
            method="highs-ds",
        )
        if found.x is None:
            raise PlanError(f"placement: {len(self.kinds)} units find no slots: {found.message}")
        flow, rest = np.rint(found.x).astype(np.int64), np.zeros(self.shared.shape, np.int64)
        rest[sort, kind] = flow[edges:]
        chosen: list[int | None] = [None] * len(self.kinds)
        for edge in np.flatnonzero(flow[:edges]):
            chosen[unit[edge]] = int(at[edge])
        self._deal(chosen, rest)
        return self._filled(chosen)

    def _filled(self, chosen: list[int | None]) -> list[int | None]:
        """With the bins that are left, in order, for units that have none."""
        used = [number for number in chosen if number is not None]
        free = self.slots - np.bincount(used, minlength=len(self.slots)).astype(np.int64)
        left = iter(np.repeat(np.arange(len(free)), free).tolist())
        return [next(left, None) if number is None else number for number in chosen]

    def _deal(self, chosen: list[int | None], flow: NDArray[np.int64]) -> None:
        """Gives units without a bin one of a sort, so many of each kind."""
        used = [number for number in chosen if number is not None]
        free = self.slots - np.bincount(used, minlength=len(self.slots))
        bins: list[list[int]] = [[] for _ in range(len(flow))]
        for number, sort in enumerate(self.sorts):
            bins[sort] += [number] * int(free[number])
        waiting: list[list[int]] = [[] for _ in range(flow.shape[1])]
        for unit, taken in enumerate(chosen):
            if taken is None:
                waiting[self.kinds[unit]].append(unit)
        for sort, counts in enumerate(flow):
            for kind, count in enumerate(counts):
                for _ in range(count):
                    chosen[waiting[kind].pop(0)] = bins[sort].pop(0)

    def _in_order(self, chosen: list[int | None]) -> list[int | None]:
        """Deals out anew, in order, the units that gain nothing of their own."""
        taken: list[tuple[list[int], list[int]]] = [([], []) for _ in range(len(self.shared))]
        gain = {(int(b), int(u)) for b, u in zip(*self.own.nonzero(), strict=True)}
        for unit, number in enumerate(chosen):
            if number is not None and (number, unit) not in gain:
                units, bins = taken[self.sorts[number]]
                units.append(unit)
                bins.append(number)
        dealt = list(chosen)
        for units, bins in taken:
            for unit, number in zip(units, sorted(bins), strict=True):
                dealt[unit] = number
        return dealt
