"""The optimizer's state in bucket space: as the buckets of Megatron's distributed optimizer had it
in the layout that saved it (`dp_reshardable`).

optimizer.distributed.dp_group_idx_<g>.gbuf_idx_<n>.dtype_<dtypes>.bucket_idx_<k>.<kind>

is one flat tensor: the local parameters of a tp rank's stage (and of an ep rank's experts, in an
optimizer of their own), chunk n, bucket k, in reverse order, each from a multiple of 64 elements
on. Which parameters are in a bucket follows from the bucket's size.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from liver_hpc.checkpoint.torch_dist.contents import Contents
from liver_hpc.checkpoint.torch_dist.files import Place, Tensor
from liver_hpc.checkpoint.torch_dist.places import Part, runs
from liver_hpc.errors import CheckpointError, ConfigError
from liver_hpc.layout.ownership import PARAMETER_ALIGNMENT, local_shape, slabs
from liver_hpc.layout.tensors import MAIN, Box, ModelSpec, TensorSpec
from liver_hpc.world.sharded import Sharded

_KEY = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_.*\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$"
)
_STATES = {MAIN: "param"}


class _Span(NamedTuple):
    """Where a local parameter lies: which bucket, and from which element on."""

    buffer: int
    bucket: int
    start: int


_Buffers = dict[int, dict[int, dict[str, Tensor]]]
"""By chunk and bucket: the bucket's tensors, by the state that they are."""


class Buckets:
    """The buckets of a checkpoint. Raises CheckpointError where they are not those of the model in
    the layout that saved it."""

    def __init__(
        self, contents: Contents, model: ModelSpec, pieces: Mapping[str, Sequence[Sharded]]
    ) -> None:
        self._path, self._layout = contents.path, contents.layout
        self._model = _as_padded(contents, model, pieces)
        try:
            self._model.check_layout(self._layout)
        except ConfigError as error:
            raise CheckpointError(
                f"{self._path} was saved in {self._layout}, as which the run's model cannot be "
                f"had: {error}"
            ) from error
        self._groups: dict[tuple[int, int], _Buffers] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(dict))
        )
        for key, tensor in contents.table.tensors.items():
            if match := _KEY.match(key):
                chained, group, buffer, bucket = (int(number or 0) for number in match.groups()[:4])
                self._groups[chained, group][buffer][bucket][match[5]] = tensor
        self._spans = cache(self._spans_of)

    def parts(
        self, kind: str, tensor_index: int, box: Box
    ) -> Iterator[tuple[Place | None, Part, Box, Part]]:
        """What of a box lies where: the place and a part of what is there, a box within the one
        given and a part of that; without a place what the checkpoint does not have, as it has less
        padding."""
        tensor, layout = self._model.tensors[tensor_index], self._layout
        _, cols = local_shape(tensor, layout.tp)
        for tp in range(1 if tensor.tp_dim is None else layout.tp):
            for slab in slabs(tensor, layout.tp, tp):
                common = slab.box.intersect(box)
                if common is None:
                    continue
                local = slab.to_local(common)
                for place, start, low, high in self._chunks(kind, tensor_index, tp, local, cols):
                    for a, _, ((row, rows), (col, width)) in runs(low, high, (high, cols)):
                        whole = Box(row, row + rows, col, col + width)
                        part = whole.intersect(local)
                        if part is not None:
                            within = (
                                (part.row0 - row, part.shape[0]),
                                (part.col0 - col, part.shape[1]),
                            )
                            source = Part(a - low + start, (rows, width), within)
                            yield place, source, slab.to_global(part), _all_of(part.shape)
        if box.row1 > tensor.rows:
            rest = box._replace(row0=max(box.row0, tensor.rows))
            yield None, _all_of(rest.shape), rest, _all_of(rest.shape)

    def _chunks(
        self, kind: str, tensor_index: int, tp: int, local: Box, cols: int
    ) -> Iterator[tuple[Place, int, int, int]]:
        """(place, first element there, flat interval of the local parameter) of all that holds a
        part of a local box."""
        low, high = local.row0 * cols + local.col0, (local.row1 - 1) * cols + local.col1
        stage = self._model.stages_of(tensor_index, self._layout)[0]
        home = self._model.home(tensor_index, self._layout)
        span = self._spans(stage, home, tp)[tensor_index]
        state = _STATES.get(kind, kind)
        tensor = self._group(stage, home, tp)[span.buffer][span.bucket].get(state)
        if tensor is None:
            raise CheckpointError(f"{self._path} lacks {state} of bucket {span.bucket}")
        for ((begin, length),), place in sorted(tensor.chunks):
            start, end = max(begin, span.start + low), min(begin + length, span.start + high)
            if start < end:
                yield place, start - begin, start - span.start, end - span.start

    def _group(self, stage: int, home: int | None, tp: int) -> _Buffers:
        """The buffers of a tp rank's stage, or of the experts that an ep rank has there."""
        layout = self._layout
        chained = sorted({chained for chained, _ in self._groups})
        block = stage if home is None else home + layout.ep * stage
        number = tp + layout.tp * block
        known = chained[:1] if home is None else chained[1:]
        found = self._groups.get((known[0], number)) if known else None
        if found is None:
            raise CheckpointError(
                f"{self._path} lacks the optimizer's state of model-parallel rank {number}"
            )
        return found

    def _spans_of(self, stage: int, home: int | None, tp: int) -> dict[int, _Span]:
        model, layout = self._model, self._layout
        chunks = [
            [
                index
                for index in reversed(chunk)
                if model.tensors[index].role == "trained" and model.home(index, layout) == home
            ]
            for chunk in model.chunks(layout, stage)
        ]
        buffers = self._group(stage, home, tp)
        filled = [chunk for chunk in chunks if chunk]
        found: dict[int, _Span] = {}
        for number, chunk in enumerate(filled):
            ends = [
                next(iter(states.values())).shape[0]
                for _, states in sorted(buffers[number].items())
            ]
            found |= self._spans_in(number, chunk, ends)
        return found

    def _spans_in(self, buffer: int, chunk: Sequence[int], ends: Sequence[int]) -> dict[int, _Span]:
        """Where the parameters of a chunk lie, whose buckets have these sizes."""
        found, bucket, end = {}, 0, 0
        for index in chunk:
            start = _aligned(end)
            end = start + math.prod(local_shape(self._model.tensors[index], self._layout.tp))
            if bucket == len(ends) or end > ends[bucket]:
                break
            found[index] = _Span(buffer, bucket, start)
            if _aligned(end) >= ends[bucket]:  # before a bucket of its own Megatron counts the gap
                bucket, end = bucket + 1, 0
        if len(found) != len(chunk) or bucket != len(ends):
            names = [self._model.tensors[index].name for index in chunk]
            raise CheckpointError(
                f"{self._path}: the optimizer's buckets, of {list(ends)} elements, are not those "
                f"of {names[0]!r} to {names[-1]!r} in {self._layout}; save it once more with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        return found


def _aligned(end: int) -> int:
    return -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT


def _all_of(shape: tuple[int, int]) -> Part:
    return Part(0, shape, tuple((0, length) for length in shape))


def _as_padded(
    contents: Contents, model: ModelSpec, pieces: Mapping[str, Sequence[Sharded]]
) -> ModelSpec:
    """The model with its vocabulary padded as it was when it was saved."""

    def padded(tensor: TensorSpec) -> TensorSpec:
        piece = pieces[tensor.name][0]
        if not piece.padded:
            return tensor
        dim = len(piece.at) - len(piece.local)
        rows = contents.table.tensors[piece.key].shape[dim]
        if rows == tensor.shape[0]:
            return tensor
        blocks = (rows,) if tensor.tp_blocks else ()
        return replace(tensor, shape=(rows, *tensor.shape[1:]), tp_blocks=blocks)

    return replace(model, tensors=tuple(map(padded, model.tensors)))
