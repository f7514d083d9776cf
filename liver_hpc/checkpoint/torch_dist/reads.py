"""What a worker reads of a torch_dist checkpoint: pure.

Parameters lie under the keys of the module, each as a tensor of the whole model. The optimizer's
state lies as they do (model space), or in the buckets of the layout that saved it (bucket space,
buckets.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from liver_hpc.checkpoint.torch_dist.buckets import Buckets
from liver_hpc.checkpoint.torch_dist.contents import Contents, Held
from liver_hpc.checkpoint.torch_dist.files import Place, Tensor, dtype_bytes
from liver_hpc.checkpoint.torch_dist.places import (
    Part,
    elements,
    first_of_each,
    relative,
    stored,
)
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.tensors import EXP_AVG, EXP_AVG_SQ, MAIN, PARAMETER, Box, ModelSpec
from liver_hpc.world.sharded import NBox, Sharded, intersection

PREFIXES: Mapping[str, tuple[str, ...]] = {
    PARAMETER: ("",),
    MAIN: ("optimizer.state.param.", "optimizer.state.fp32_param."),
    EXP_AVG: ("optimizer.state.exp_avg.",),
    EXP_AVG_SQ: ("optimizer.state.exp_avg_sq.",),
}
"""What a key has before the parameter's: the distributed optimizer's name comes first."""

_FLOATS = ("bfloat16", "float16", "float32")
"""Precisions that weights are cast between."""

Chunk = tuple[NBox, Place]
Pieces = Mapping[str, Sequence[Sharded]]
"""Of each tensor by name: where its parts lie."""


class Read(NamedTuple):
    """`source` of what lies at a place becomes `part` of a box of the state. place: None for zeros,
    which are padding of which the checkpoint has less."""

    place: Place | None
    source: Part
    kind: str
    tensor_index: int
    box: Box
    part: Part


class Source:
    """A checkpoint, as it is read for a model. pieces: of its tensors, as the checkpoint's content
    metadata has them. weights: parameters and buffers alone are read of it, and cast where they
    have another precision there.

    Raises CheckpointError for a checkpoint of another model.
    """

    def __init__(self, held: Held, model: ModelSpec, pieces: Pieces, weights: bool = False) -> None:
        self._model, self._pieces = model, pieces
        self._table = held.table.tensors
        self._path = held.path
        self._weights = weights
        self._kinds = (PARAMETER,) if weights else model.kinds
        in_buckets = held if isinstance(held, Contents) and held.by_buckets else None
        self._check(in_buckets is not None)
        self._buckets = None if in_buckets is None else Buckets(in_buckets, model, pieces)
        self._at_places: dict[int, Mapping[tuple[int, ...] | None, Sequence[Chunk]]] = {}

    def _check(self, in_buckets: bool) -> None:
        """That the model's tensors are there, of their shapes and types, with all that is trained
        of them."""
        for index, tensor in enumerate(self._model.tensors):
            for kind in self._kinds:
                trained = kind != PARAMETER
                if trained and (tensor.role != "trained" or in_buckets):
                    continue
                for piece in self._pieces[tensor.name]:
                    held = self._tensor(kind, piece)
                    if fault := self._dtype_fault(kind, index, held.dtype):
                        raise CheckpointError(f"{self._path}: {kind} of {tensor.name!r} is {fault}")

    def _dtype_fault(self, kind: str, index: int, held: str) -> str:
        """Of a frozen parameter, which may have any precision, the bytes alone are known here."""
        wanted, role = self._model.element_bytes(kind, index), self._model.tensors[index].role
        if role == "buffer" or (self._weights and held in _FLOATS and wanted > 1):
            return ""
        if role == "trained":
            dtype = {2: "bfloat16", 4: "float32"}[wanted]
            return "" if held == dtype else f"{held} in it, {dtype} in the run"
        differs = dtype_bytes(held) != wanted
        return f"{held} in it, of {wanted} bytes an element in the run" if differs else ""

    def _tensor(self, kind: str, piece: Sharded) -> Tensor:
        keys = [prefix + piece.key for prefix in PREFIXES[kind]]
        held = next((self._table[key] for key in keys if key in self._table), None)
        if held is None:
            raise CheckpointError(f"{self._path} lacks {keys[0]!r} of the run's model")
        differ = [
            size != wanted
            for dim, (size, wanted) in enumerate(zip(held.shape, piece.shape, strict=False))
            if not (piece.padded and dim == len(piece.at) - len(piece.local))
        ]
        if len(held.shape) != len(piece.shape) or any(differ):
            raise CheckpointError(
                f"{self._path} is of another model: {keys[0]!r} is {held.shape} in it, "
                f"{piece.shape} in the run's model"
            )
        return held

    def reads(self, layout: Layout, at: Coordinate) -> list[Read]:
        """All that a coordinate of a layout reads, in the order in which it lies in the files.

        Raises CheckpointError where the checkpoint does not hold all of it.
        """
        reads: list[Read] = []
        for index in self._model.held_tensors(layout, at):
            for kind in self._kinds:
                for box in owned_boxes(self._model, layout, at, kind, index):
                    found = [*self._of_box(kind, index, box)]
                    got = sum(elements(each.part.within) for each in found)
                    if got != box.elements:
                        name = self._model.tensors[index].name
                        raise CheckpointError(
                            f"{self._path} holds {got} of the {box.elements} elements of {kind} "
                            f"{box} of {name!r}"
                        )
                    reads += found
        return sorted(reads, key=lambda read: (read.place is not None, read))

    def _chunks(self, held: Tensor, places: NBox) -> Iterator[Chunk]:
        """Of the chunks of a key those that may lie at these places, as of a layer and an expert,
        which are the first dimensions: a few of tens of thousands."""
        if any(length != 1 for _, length in places):
            return iter(held.chunks)
        if id(held) not in self._at_places:
            found: defaultdict[tuple[int, ...] | None, list[Chunk]] = defaultdict(list)
            for chunk in held.chunks:
                first = chunk[0][: len(places)]
                is_one = all(length == 1 for _, length in first)
                found[tuple(start for start, _ in first) if is_one else None].append(chunk)
            self._at_places[id(held)] = dict(found)
        at = self._at_places[id(held)]
        return chain(at.get(tuple(start for start, _ in places), ()), at.get(None, ()))

    def _of_box(self, kind: str, index: int, box: Box) -> Iterator[Read]:
        if kind != PARAMETER and self._buckets is not None:
            for place, source, part_box, part in self._buckets.parts(kind, index, box):
                yield Read(place, source, kind, index, part_box, part)
            return
        tensor = self._model.tensors[index]
        for found in stored(tensor, box, first_of_each(self._pieces[tensor.name])):
            held = self._tensor(kind, found.piece)
            for at, place in self._chunks(held, found.at[: len(found.at) - len(found.piece.local)]):
                common = intersection(at, found.at)
                if common is not None:
                    lengths = tuple(length for _, length in at)
                    source = Part(0, lengths, relative(common, at))
                    inner = relative(common, found.at)[len(at) - len(found.part.lengths) :]
                    yield Read(place, source, kind, index, found.box, found.part.narrowed(inner))
            if found.piece.padded:
                dim = len(found.at) - len(found.piece.local)
                start, length = found.at[dim]
                there = min(max(held.shape[dim] - start, 0), length)
                if there < length:
                    own = found.part.within
                    inner = ((there, length - there), *((0, size) for _, size in own[1:]))
                    part = found.part.narrowed(inner)
                    yield Read(None, part, kind, index, found.box, part)
