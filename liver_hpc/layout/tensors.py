"""The tensors of a model in global terms, and the boxes and moves that plans are made of.

Every tensor is seen as a matrix: a 1-D tensor of n elements is [n, 1].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from liver_hpc.errors import ConfigError

PARAMETER = "parameter"
MAIN = "main"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)


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

    Seen as a matrix, the dimensions from `tp_dim` on (from the second on, where it is 0 or None)
    are the columns.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_blocks: tuple[int, ...] = ()
    tied: bool = False

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


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The tensors of a model, and which of them each pipeline stage holds.

    stages: by pp, the tensors of each stage by index, in the order of its `module.parameters()`.
    parameter_bytes: bytes of one model parameter (4 in fp32, 2 in bf16). The optimizer's main
    copy and moments are fp32; in fp32 runs the main copy is the parameter itself.
    refused: why the model cannot be laid out so, by `axes`.
    Compared and hashed by identity: ownership is memoized per model.
    """

    tensors: tuple[TensorSpec, ...]
    stages: Mapping[int, tuple[tuple[int, ...], ...]]
    parameter_bytes: int
    refused: Mapping[str, str] = field(default_factory=dict)

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

    @cached_property
    def digest(self) -> str:
        """Equal for equal specs only, as far as their tensors and stages go."""
        known = (self.tensors, sorted(self.stages.items()), self.parameter_bytes)
        return hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def check_layout(self, tp: int, pp: int) -> None:
        """Raises ConfigError where the model cannot be split so."""
        refused = self.refused.get(axes(tp, pp))
        if refused:
            raise ConfigError(refused)
        if pp not in self.stages:
            raise ConfigError(f"pp={pp}: the model's spec has pp {sorted(self.stages)} only")
        for tensor in self.tensors:
            if tensor.tp_dim is not None and any(block % tp for block in tensor.blocks):
                raise ConfigError(
                    f"tensor {tensor.name}: dimension {tensor.tp_dim} is "
                    f"{tensor.shape[tensor.tp_dim]}, in blocks of {tensor.tp_blocks}, which "
                    f"tp={tp} does not divide"
                )

    def stages_of(self, tensor_index: int, pp: int) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor: one, or several for tied copies."""
        return _stages_of_tensors(self, pp)[tensor_index]

    def stage_tensors(self, pp: int, stage: int) -> tuple[int, ...]:
        """Indices of a stage's tensors in the order of its `module.parameters()`."""
        return self.stages[pp][stage]

    def element_bytes(self, kind: str) -> int:
        return self.parameter_bytes if kind == PARAMETER else 4


def axes(tp: int, pp: int) -> str:
    """The key of `ModelSpec.refused`."""
    return f"tp{tp} pp{pp}"


@lru_cache(maxsize=256)
def _stages_of_tensors(model: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    held: list[list[int]] = [[] for _ in model.tensors]
    for stage in range(pp):
        for index in model.stage_tensors(pp, stage):
            held[index].append(stage)
    return tuple(map(tuple, held))


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
