"""Bytes between the workers of one handoff, as a matrix: a table whose cells are shaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.wording import bytes_text, ids_text
from liver_hpc.run.records import TrafficRecord

MOST_CELLS = 12
"""Workers of a larger handoff are put together in groups, so many a side."""


@dataclass(frozen=True)
class Matrix:
    """Bytes from the group of each row to the group of each column."""

    groups: tuple[tuple[int, ...], ...]
    num_bytes: tuple[tuple[int, ...], ...]

    @property
    def largest(self) -> int:
        return max((cell for row in self.num_bytes for cell in row), default=0)


def matrix(traffic: Sequence[TrafficRecord], generation: int) -> Matrix:
    """All of a handoff's traffic; workers that neither send nor receive are left out."""
    own = [row for row in traffic if row.generation == generation]
    workers = sorted({worker for row in own for worker in (row.sender, row.receiver)})
    size = -(-len(workers) // MOST_CELLS) or 1
    groups = tuple(tuple(workers[i : i + size]) for i in range(0, len(workers), size))
    index = {worker: number for number, group in enumerate(groups) for worker in group}
    cells = [[0] * len(groups) for _ in groups]
    for row in own:
        cells[index[row.sender]][index[row.receiver]] += row.bytes
    return Matrix(groups, tuple(map(tuple, cells)))


def table(of: Matrix) -> Element:
    """Senders are rows, receivers columns; the darker, the more."""
    element = Element("table", {"class": "matrix"})
    SubElement(element, "caption").text = "Bytes from worker (row) to worker (column)"
    names = [ids_text(group) for group in of.groups]
    head = SubElement(SubElement(element, "thead"), "tr")
    for name in ("from \\ to", *names, "sent"):
        SubElement(head, "th", {"scope": "col"}).text = name
    body = SubElement(element, "tbody")
    for number, (name, cells) in enumerate(zip(names, of.num_bytes, strict=True)):
        row = SubElement(body, "tr")
        SubElement(row, "th", {"scope": "row"}).text = name
        for column, num_bytes in enumerate(cells):
            share = num_bytes / of.largest if of.largest else 0.0
            cell = SubElement(row, "td", {"style": f"--share:{share:.3f}"})
            if num_bytes:
                cell.text = bytes_text(num_bytes)
            else:
                cell.set("class", "self" if column == number else "none")
                cell.text = "\u00b7"
        SubElement(row, "td", {"class": "sum"}).text = bytes_text(sum(cells))
    return element
