"""The tensors of a model in global terms, and the boxes and moves that plans are made of.

Every tensor is seen as a matrix: a 1-D tensor of n elements is [n, 1].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout

PARAMETER = "parameter"
MAIN = "main"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)

Role = Literal["trained", "frozen", "buffer"]
"""What training does with a tensor; only what is trained has optimizer state."""

Operation = tuple[str, tuple[float | None, ...]]
"""A method of a torch tensor that works on each element alone, and its numbers."""
First = tuple[Operation, ...] | str
"""What fills a whole tensor at the start, in order; else why that cannot be had."""


class Box(NamedTuple):
    """Half-open ranges of rows and columns of a global tensor, in elements."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row1 - self.row0, self.col1 - self.col0

    @property
    def elements(self) -> int:
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def moved(self, rows: int, cols: int) -> Box:
        """The same box, so many rows further down and columns further right."""
        return Box(self.row0 + rows, self.row1 + rows, self.col0 + cols, self.col1 + cols)

    def intersect(self, other: Box) -> Box | None:
        """The common box; None when there is none."""
        row0, row1 = max(self.row0, other.row0), min(self.row1, other.row1)
        if row0 >= row1:
            return None
        col0, col1 = max(self.col0, other.col0), min(self.col1, other.col1)
        return Box(row0, row1, col0, col1) if col0 < col1 else None


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor of the model, the same for all layouts.

    name: its parameter's name at tp=pp=1. shape: global shape, in elements; any rank.
    tp_dim: the dimension that tensor parallelism splits; None: a copy on every tp rank.
    tp_blocks: sizes of the blocks along `tp_dim`, each of which is split over tp on its own (a
        SwiGLU fc1 holds gate and up); () means one block.
    tied: several stages hold a copy of it in some layout of the run (tied embeddings).
    expert: in some layout of the run only some replicas hold it (one expert's weights).
    role: whether it is trained, a frozen parameter, or a persistent buffer.
    element_bytes: bytes of one element; None: as the model's parameters have.
    first: how the model's own initialization fills it; of no concern to who holds what.

    Seen as a matrix, the dimensions from `tp_dim` on (from the second on, where it is 0 or None)
    are the columns.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_blocks: tuple[int, ...] = ()
    tied: bool = False
    expert: bool = False
    role: Role = "trained"
    element_bytes: int | None = None
    first: First = field(default="nothing was recorded of it", compare=False, repr=False)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: self.tp_dim or 1])

    @property
    def cols(self) -> int:
        return math.prod(self.shape[self.tp_dim or 1 :])

    @property
    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks that tensor parallelism splits, in rows (tp_dim 0) or columns."""
        assert self.tp_dim is not None
        inner = 1 if self.tp_dim == 0 else math.prod(self.shape[self.tp_dim + 1 :])
        return tuple(size * inner for size in self.tp_blocks or (self.shape[self.tp_dim],))

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def whole(self) -> Box:
        return Box(0, self.rows, 0, self.cols)


Chunks = tuple[tuple[int, ...], ...]
"""Indices of the tensors of each model chunk of a stage, in the order of its module's."""


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The tensors of a model, and who holds which of them.

    stages: by `pipeline`, the chunks of each stage. A chunk's tensors are in the order of its
        `module.parameters()`, its buffers behind them.
    parameter_bytes: bytes of one model parameter (4 in fp32, 2 in bf16). The optimizer's main
        copy and moments are fp32; in fp32 runs the main copy is the parameter itself.
    gradient_bytes: bytes of one element of the gradients, in which they are added up and reduced.
    homes: by ep, the ep rank that holds each tensor; None: all of them do.
    bucket_elements: size at which the first stage's first chunk begins another gradient bucket;
        None: it has one, as all others have.
    refused: why the model cannot be laid out so, by the text of `Layout.least`.
    Compared and hashed by identity: ownership is memoized per model.
    """

    tensors: tuple[TensorSpec, ...]
    stages: Mapping[str, tuple[Chunks, ...]]
    parameter_bytes: int
    homes: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    bucket_elements: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    gradient_bytes: int = 4

    @property
    def main_is_parameter(self) -> bool:
        return self.parameter_bytes == 4

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """Kinds of optimizer state that exist apart from the parameters."""
        return MOMENTS if self.main_is_parameter else (MAIN, *MOMENTS)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (PARAMETER, *self.optimizer_kinds)

    @property
    def elements(self) -> int:
        """Elements of all parameters, each once."""
        return sum(tensor.elements for tensor in self.tensors if tensor.role != "buffer")

    @cached_property
    def digest(self) -> str:
        """Equal for equal specs only, as far as it says what a worker holds."""
        held = (sorted(self.stages.items()), sorted(self.homes.items()), self.bucket_elements)
        known = (self.tensors, self.parameter_bytes, self.gradient_bytes, held)
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def check_layout(self, layout: Layout) -> None:
        """Raises ConfigError where the model cannot be laid out so."""
        refused = self.refused.get(str(layout.least))
        if refused:
            raise ConfigError(refused)
        if pipeline(layout) not in self.stages:
            known = ", ".join(sorted(self.stages))
            raise ConfigError(f"{pipeline(layout)}: the model's spec has {known} only")
        if layout.ep > 1 and layout.ep not in self.homes:
            raise ConfigError(f"ep={layout.ep}: the model's spec has ep {sorted(self.homes)} only")
        for tensor in self.tensors:
            if tensor.tp_dim is not None and any(block % layout.tp for block in tensor.blocks):
                raise ConfigError(
                    f"tensor {tensor.name}: dimension {tensor.tp_dim} is "
                    f"{tensor.shape[tensor.tp_dim]}, in blocks of {tensor.tp_blocks}, which "
                    f"tp={layout.tp} does not divide"
                )

    def chunks(self, layout: Layout, stage: int) -> Chunks:
        """The tensors of each chunk of a stage, those of all its experts."""
        return self.stages[pipeline(layout)][stage]

    def stages_of(self, tensor_index: int, layout: Layout) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor: one, or several for tied copies."""
        return _stages_of_tensors(self, pipeline(layout))[tensor_index]

    def home(self, tensor_index: int, layout: Layout) -> int | None:
        """The ep rank that holds a tensor; None: all of them do."""
        return self.homes[layout.ep][tensor_index] if layout.ep > 1 else None

    def holders(self, tensor_index: int, layout: Layout) -> range:
        """The replicas that hold a tensor of their stage."""
        home = self.home(tensor_index, layout)
        return range(layout.replicas) if home is None else range(home, layout.replicas, layout.ep)

    def held_tensors(self, layout: Layout, at: Coordinate) -> tuple[int, ...]:
        """Indices of the tensors that a coordinate holds, chunk by chunk, in the order of its
        modules."""
        return _held_tensors(self, layout.least, at.pp, layout.ep_rank(at))

    def element_bytes(self, kind: str, tensor_index: int) -> int:
        """Bytes of one element of a kind of a tensor's state."""
        if kind != PARAMETER:
            return 4
        return self.tensors[tensor_index].element_bytes or self.parameter_bytes


def pipeline(layout: Layout) -> str:
    """The key of `ModelSpec.stages`."""
    return f"pp{layout.pp}" + (f" vpp{layout.vpp}" if layout.vpp > 1 else "")


@lru_cache(maxsize=256)
def _stages_of_tensors(model: ModelSpec, pipeline: str) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in model.tensors]
    for stage, chunks in enumerate(model.stages[pipeline]):
        for chunk in chunks:
            for index in chunk:
                held[index].append(stage)
    return tuple(map(tuple, held))


@lru_cache(maxsize=4096)
def _held_tensors(model: ModelSpec, layout: Layout, stage: int, ep_rank: int) -> tuple[int, ...]:
    return tuple(
        index
        for chunk in model.chunks(layout, stage)
        for index in chunk
        if model.home(index, layout) in (None, ep_rank)
    )


def contradictions(spec: ModelSpec) -> Iterator[str]:
    """What a spec says against itself, by the names of tensors: marks by which copies are compared
    and buckets are laid out, and what the tables of stages and homes say. Whether it is true of its
    run's model, the workers find out."""
    tensors = range(len(spec.tensors))
    for key, stages in spec.stages.items():
        held: list[set[int]] = [set() for _ in tensors]
        for stage, chunks in enumerate(stages):
            for index in (index for chunk in chunks for index in chunk):
                if index not in tensors:
                    yield f"{key}: stage {stage} holds tensor {index} of {len(tensors)}"
                else:
                    held[index].add(stage)
        for tensor, copies in zip(spec.tensors, held, strict=True):
            if not copies:
                yield f"{tensor.name}: no stage of {key} holds it"
            elif len(copies) > 1 and not tensor.tied:
                yield f"{tensor.name}: stages {sorted(copies)} of {key} hold it, but it is not tied"
    for ep, homes in spec.homes.items():
        if len(homes) != len(tensors):
            yield f"ep{ep}: there are homes for {len(homes)} tensors, of {len(tensors)}"
            continue
        for tensor, home in zip(spec.tensors, homes, strict=True):
            if home is not None and not tensor.expert:
                yield f"{tensor.name}: rank {home} of ep{ep} holds it alone, but it is no expert's"
            if home is not None and home not in range(ep):
                yield f"{tensor.name}: its home is rank {home} of ep{ep}"


class Move(NamedTuple):
    """One box of one kind of one tensor, from one worker to another. Moves cross in their order."""

    tensor_index: int
    kind: str
    box: Box
    sender: int
    receiver: int


@dataclass(frozen=True)
class TransferPlan:
    """What one worker sends, receives and copies within itself; each list sorted.

    Both ends of a pair derive the same list of moves between them, alone.
    """

    worker: int
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    local: tuple[Move, ...]

    @classmethod
    def of(cls, worker: int, outgoing: Iterable[Move], incoming: Iterable[Move]) -> TransferPlan:
        """What is incoming from the worker itself is copied."""
        receives, local = list[Move](), list[Move]()
        for move in sorted(incoming):
            (local if move.sender == worker else receives).append(move)
        return cls(worker, tuple(sorted(outgoing)), tuple(receives), tuple(local))
