"""Which part of a checkpoint's tensors a box of the model's is: pure.

A box of the model is one of a matrix (layout/tensors.py); what a checkpoint holds under a key has
as many dimensions as the module's tensor, and maybe some before them (a layer's number).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from liver_hpc.layout.tensors import Box, TensorSpec
from liver_hpc.world.sharded import NBox, Sharded, intersection


class Part(NamedTuple):
    """A part of some memory: of its elements from `start` on, seen with these `lengths`, the box
    `within`."""

    start: int
    lengths: tuple[int, ...]
    within: NBox

    def narrowed(self, inner: NBox) -> Part:
        """A box of the part, whose first element is at (0, 0, ...)."""
        both = zip(self.within, inner, strict=True)
        return self._replace(within=tuple((a + b, length) for (a, _), (b, length) in both))


class Stored(NamedTuple):
    """A part of a box of the model, and where that lies under a key: `box`, a matrix of as many
    elements as `part` sees; `at`, of the key's tensor."""

    box: Box
    part: Part
    piece: Sharded
    at: NBox


def stored(tensor: TensorSpec, box: Box, pieces: Sequence[Sharded]) -> Iterator[Stored]:
    """Where a box of a tensor lies, piece by piece."""
    for matrix, whole in runs_of_box(tensor, box):
        lengths = tuple(length for _, length in whole)
        for piece in pieces:
            common = intersection(piece.local, whole)
            if common is not None:
                within = relative(common, whole)
                inside = relative(common, piece.local)
                before = len(piece.at) - len(inside)
                own = zip(piece.at[before:], inside, strict=True)
                at = (*piece.at[:before], *((a + start, length) for (a, _), (start, length) in own))
                yield Stored(matrix, Part(0, lengths, within), piece, at)


def first_of_each(pieces: Sequence[Sharded]) -> list[Sharded]:
    """Of those that are one box of the module, as of a parameter with two names, the first."""
    found: dict[NBox, Sharded] = {}
    for piece in pieces:
        found.setdefault(piece.local, piece)
    return [*found.values()]


def runs_of_box(tensor: TensorSpec, box: Box) -> Iterator[tuple[Box, NBox]]:
    """A box of the matrix, cut into parts that are boxes of the tensor, too."""
    split = tensor.tp_dim or 1
    for row0, row1, rows in runs(box.row0, box.row1, tensor.shape[:split]):
        for col0, col1, cols in runs(box.col0, box.col1, tensor.shape[split:]):
            yield Box(row0, row1, col0, col1), (*rows, *cols)


def runs(start: int, end: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, int, NBox]]:
    """A flat row-major interval [start, end), as intervals that are boxes, in their order."""
    if start >= end:
        return
    if len(lengths) < 2:
        yield start, end, ((start, end - start),) if lengths else ()
        return
    inner = math.prod(lengths[1:])
    row0, offset0 = divmod(start, inner)
    row1, offset1 = divmod(end, inner)
    if offset0:
        last = inner if row0 < row1 else offset1
        for a, b, box in runs(offset0, last, lengths[1:]):
            yield row0 * inner + a, row0 * inner + b, ((row0, 1), *box)
        if row0 == row1:
            return
        row0 += 1
    if row0 < row1:
        whole = tuple((0, length) for length in lengths[1:])
        yield row0 * inner, row1 * inner, ((row0, row1 - row0), *whole)
    for a, b, box in runs(0, offset1, lengths[1:]):
        yield row1 * inner + a, row1 * inner + b, ((row1, 1), *box)


def relative(box: NBox, within: NBox) -> NBox:
    """A box, inside another one, in coordinates of that."""
    return tuple(
        (start - begin, length) for (start, length), (begin, _) in zip(box, within, strict=True)
    )


def elements(box: NBox) -> int:
    return math.prod(length for _, length in box)
