"""Which boxes of which tensors a coordinate owns: pure functions of (model, layout, coordinate).

Parameters: a coordinate holds its whole tensor-parallel share of every tensor of its stage, the
same on every replica; with expert parallelism, of experts those of its ep rank. Optimizer state:
Megatron's distributed optimizer lays the local parameters of a model chunk, in reverse order, into
buckets and gives each replica one equal slice of every bucket; with ep > 1 experts have buckets of
their own, which those share that hold the same experts
(megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer and
megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._build_model_gbuf_range); a slice
cuts a parameter in its flat, row-major order, so it is at most three boxes of the local matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec, TensorSpec

PARAMETER_ALIGNMENT = 64
"""Elements; every parameter starts at a multiple of it in its bucket."""
BUCKET_ALIGNMENT = 128
"""Elements; a bucket's size is a multiple of this and of the number of its ranks."""


@dataclass(frozen=True)
class Slab:
    """A box of the global tensor and where its corner sits in the local matrix."""

    box: Box
    local_row: int
    local_col: int

    def to_local(self, box: Box) -> Box:
        """A global box, inside this slab, in coordinates of the local matrix."""
        return box.moved(self.local_row - self.box.row0, self.local_col - self.box.col0)

    def to_global(self, local: Box) -> Box:
        """A box of the local matrix, inside this slab, in global coordinates."""
        return local.moved(self.box.row0 - self.local_row, self.box.col0 - self.local_col)


def local_shape(tensor: TensorSpec, tp: int) -> tuple[int, int]:
    """Rows and columns of one tp rank's share of a tensor that tp divides."""
    if tensor.tp_dim is None:
        return tensor.rows, tensor.cols
    if tensor.tp_dim == 0:
        return tensor.rows // tp, tensor.cols
    return tensor.rows, tensor.cols // tp


@lru_cache(maxsize=1 << 16)
def slabs(tensor: TensorSpec, tp: int, tp_rank: int) -> tuple[Slab, ...]:
    """The boxes of a tp rank's share, one for each of the tensor's blocks."""
    rows, cols = local_shape(tensor, tp)
    if tensor.tp_dim is None or tp == 1:
        return (Slab(tensor.whole, 0, 0),)
    found, begin = [], 0
    for block in tensor.blocks:
        share = block // tp
        start, own = begin + tp_rank * share, begin // tp
        if tensor.tp_dim == 0:
            found.append(Slab(Box(start, start + share, 0, cols), own, 0))
        else:
            found.append(Slab(Box(0, rows, start, start + share), 0, own))
        begin += block
    return tuple(found)


def interval_boxes(start: int, end: int, cols: int) -> tuple[Box, ...]:
    """A flat row-major interval [start, end) of a matrix with `cols` columns, as 0 to 3 boxes."""
    row0, col0 = divmod(start, cols)
    row1, col1 = divmod(end, cols)
    whole = row0 + (col0 > 0)
    if row0 == row1:
        boxes = [Box(row0, row0 + 1, col0, col1)]
    else:
        boxes = [
            Box(row0, whole, col0, cols),
            Box(whole, row1, 0, cols),
            Box(row1, row1 + 1, 0, col1),
        ]
    return tuple(box for box in boxes if box.elements)


@dataclass(frozen=True)
class StageShards:
    """The optimizer buckets of one stage, each of which is cut into equal slices, one a rank:
    `places[tensor_index] = (start, end, slice)`, in elements of the tensor's bucket."""

    places: dict[int, tuple[int, int, int]]

    def interval(self, tensor_index: int, rank: int) -> tuple[int, int]:
        """Flat interval of the local parameter that a rank owns; (0, 0) when it owns none."""
        start, end, size = self.places[tensor_index]
        low, high = max(start, rank * size), min(end, (rank + 1) * size)
        return (low - start, high - start) if low < high else (0, 0)

    def owners(self, tensor_index: int, low: int = 0, high: int | None = None) -> range:
        """The ranks that own a part of the tensor, or of its flat interval [low, high)."""
        start, end, size = self.places[tensor_index]
        last = (end if high is None else start + high) - 1
        return range((start + low) // size, last // size + 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@lru_cache(maxsize=4096)
def stage_shards(
    model: ModelSpec, layout: Layout, stage: int, home: int | None = None
) -> StageShards:
    """Bucket places of a stage's trained tensors, as Megatron's buffers lay them out.

    home: those that only this ep rank holds; None: those that all hold. Their ranks are the
    replicas that hold them, in order.
    """
    ranks = layout.replicas if home is None else layout.expert_replicas
    places: dict[int, tuple[int, int, int]] = {}
    for spans in buckets(model, layout, stage, home):
        end = max(span[1] for span in spans.values())
        size = _round_up(end, math.lcm(ranks, BUCKET_ALIGNMENT)) // ranks
        places |= {index: (*span, size) for index, span in spans.items()}
    return StageShards(places)


def buckets(
    model: ModelSpec, layout: Layout, stage: int, home: int | None = None
) -> Iterator[dict[int, tuple[int, int]]]:
    """Where the trained tensors of a stage lie in their buckets, bucket by bucket: start and end,
    in elements; the same for any dp. home: as `stage_shards` has it.

    A tied embedding that is on two stages has a bucket of its own; in the first chunk of the first
    stage another one is begun where one has reached `bucket_elements`.
    """
    for number, chunk in enumerate(model.chunks(layout, stage)):
        fills_at = model.bucket_elements if stage == number == 0 else None
        spans, end = dict[int, tuple[int, int]](), 0
        for index in reversed(chunk):
            if model.tensors[index].role != "trained" or model.home(index, layout) != home:
                continue
            alone = len(model.stages_of(index, layout)) > 1
            if alone and spans:
                yield spans
                spans, end = {}, 0
            start = _round_up(end, PARAMETER_ALIGNMENT)
            end = start + math.prod(local_shape(model.tensors[index], layout.tp))
            spans[index] = start, end
            if alone or (fills_at is not None and end >= fills_at):
                yield spans
                spans, end = {}, 0
        if spans:
            yield spans


def optimizer_interval(
    model: ModelSpec, layout: Layout, at: Coordinate, tensor_index: int
) -> tuple[int, int]:
    """Flat interval of a local tensor whose optimizer state is at a coordinate that holds the
    tensor; (0, 0) for none."""
    if model.tensors[tensor_index].role != "trained":
        return (0, 0)
    home = model.home(tensor_index, layout)
    rank = model.holders(tensor_index, layout).index(at.replica)
    return stage_shards(model, layout, at.pp, home).interval(tensor_index, rank)


@lru_cache(maxsize=1 << 18)
def optimizer_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate, tensor_index: int
) -> tuple[Box, ...]:
    """Global boxes of one tensor's optimizer state at a coordinate that holds the tensor."""
    tensor = model.tensors[tensor_index]
    start, end = optimizer_interval(model, layout, at, tensor_index)
    _, cols = local_shape(tensor, layout.tp)
    return tuple(
        slab.to_global(part)
        for local in interval_boxes(start, end, cols)
        for slab in slabs(tensor, layout.tp, at.tp)
        if (part := slab.to_local(slab.box).intersect(local)) is not None
    )


def owned_boxes(
    model: ModelSpec, layout: Layout, at: Coordinate, kind: str, tensor_index: int
) -> tuple[Box, ...]:
    """Global boxes of one kind of one tensor that a coordinate owns; () when it has none."""
    if at.pp not in model.stages_of(tensor_index, layout):
        return ()
    if model.home(tensor_index, layout) not in (None, layout.ep_rank(at)):
        return ()
    if kind == PARAMETER:
        tensor = model.tensors[tensor_index]
        return tuple(slab.box for slab in slabs(tensor, layout.tp, at.tp))
    return optimizer_boxes(model, layout, at, tensor_index)


def optimizer_owners(
    model: ModelSpec, layout: Layout, at: Coordinate, tensor_index: int, boxes: Iterable[Box]
) -> list[int]:
    """The replicas that may own optimizer state within global boxes, at `at`'s tp rank and stage.

    They are found from the boxes, without asking every replica: all that own some, and a few that
    own none.
    """
    tensor = model.tensors[tensor_index]
    if tensor.role != "trained":
        return []
    shards = stage_shards(model, layout, at.pp, model.home(tensor_index, layout))
    holders = model.holders(tensor_index, layout)
    _, cols = local_shape(tensor, layout.tp)
    found: set[int] = set()
    for slab in slabs(tensor, layout.tp, at.tp):
        for box in boxes:
            part = slab.box.intersect(box)
            if part is not None:
                local = slab.to_local(part)
                low = local.row0 * cols + local.col0
                high = (local.row1 - 1) * cols + local.col1
                found.update(shards.owners(tensor_index, low, high))
    return [holders[rank] for rank in sorted(found)]
