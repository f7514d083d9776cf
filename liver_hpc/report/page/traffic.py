"""Bytes between the workers of one handoff, as a matrix: a table whose cells are shaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from liver_hpc.report.tables import Cell, Column, Sheet, Tone
from liver_hpc.report.wording import bytes_text, ids_text
from liver_hpc.run.records import TrafficRecord

MOST_CELLS = 12
"""Workers of a larger handoff are put together in groups, so many a side."""


@dataclass(frozen=True)
class Matrix:
    """Bytes from the group of each row to the group of each column; the groups' names."""

    names: tuple[str, ...]
    num_bytes: tuple[tuple[int, ...], ...]


def matrix(traffic: Sequence[TrafficRecord], generation: int) -> Matrix:
    """All of a handoff's traffic; workers that neither send nor receive are left out."""
    own = [row for row in traffic if row.generation == generation]
    workers = sorted({worker for row in own for worker in (row.sender, row.receiver)})
    size = -(-len(workers) // MOST_CELLS) or 1
    groups = [workers[i : i + size] for i in range(0, len(workers), size)]
    index = {worker: number for number, group in enumerate(groups) for worker in group}
    cells = [[0] * len(groups) for _ in groups]
    for row in own:
        cells[index[row.sender]][index[row.receiver]] += row.bytes
    return Matrix(tuple(map(ids_text, groups)), tuple(map(tuple, cells)))


def sheet(of: Matrix) -> Sheet:
    """Senders are rows, receivers columns; the darker, the more."""
    most = max((cell for row in of.num_bytes for cell in row), default=0)

    def shaded(count: int) -> Cell:
        return Cell(bytes_text(count), share=count / most) if count else Cell("\u00b7", Tone.DIM)

    rows = [
        (Cell(name), *map(shaded, cells), Cell(bytes_text(sum(cells)), Tone.DIM))
        for name, cells in zip(of.names, of.num_bytes, strict=True)
    ]
    columns = (Column("from \\ to", is_text=True), *map(Column, (*of.names, "sent")))
    return Sheet("Bytes from worker (row) to worker (column)", columns, tuple(rows))
