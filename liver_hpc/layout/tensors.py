"""The tensors of a model in global terms, and the boxes and moves that plans are made of.

Every tensor is seen as a matrix: a 1-D tensor of n elements is [n, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

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

    name: global name; a layer's tensors carry the global layer number between dots.
    shape: global shape, 1-D or 2-D, in elements.
    stage: a layer number, or "first" / "last" for the first / last pipeline stage.
    tp_dim: the dimension that tensor parallelism splits; None = a copy on every tp rank.
    tp_blocks: along `tp_dim` the tensor is this many equal blocks, each split over tp on its own
        (a SwiGLU fc1 holds gate and up: 2).
    tied_last: a second copy lives on the last stage (tied embeddings), after all its tensors.
    """

    name: str
    shape: tuple[int, ...]
    stage: int | Literal["first", "last"]
    tp_dim: int | None = None
    tp_blocks: int = 1
    tied_last: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2):
            raise ConfigError(f"tensor {self.name}: wanted a 1-D or 2-D shape, got {self.shape}")

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def whole(self) -> Box:
        return Box(0, self.rows, 0, self.cols)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The tensors, in the order in which `module.parameters()` yields them, and the layers.

    parameter_bytes: bytes of one model parameter (4 in fp32, 2 in bf16). The optimizer's main
    copy and moments are fp32; in fp32 runs the main copy is the parameter itself.
    first_stage_layers, last_stage_layers: layers of the end stages where pp > 1, when they differ
    from an even split (Megatron's num_layers_in_first/last_pipeline_stage).
    Compared and hashed by identity: ownership is memoized per model.
    """

    tensors: tuple[TensorSpec, ...]
    layers: int
    parameter_bytes: int
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

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

    def stage_layers(self, pp: int) -> tuple[int, ...]:
        """Layers on each of `pp` stages; raises ConfigError where they do not divide."""
        if pp == 1:
            return (self.layers,)
        ends = {0: self.first_stage_layers, pp - 1: self.last_stage_layers}
        fixed = {stage: count for stage, count in ends.items() if count is not None}
        rest, free = self.layers - sum(fixed.values()), pp - len(fixed)
        if rest < free or (free == 0 and rest != 0) or (free and rest % free):
            raise ConfigError(
                f"pp={pp} does not divide {rest} layers over {free} stages"
                + (f" beside fixed end stages {fixed}" if fixed else "")
            )
        return tuple(fixed.get(stage, rest // max(free, 1)) for stage in range(pp))

    def stages_of(self, tensor: TensorSpec, pp: int) -> tuple[int, ...]:
        """The pipeline stages that hold the tensor: one, or first and last for tied copies."""
        if tensor.stage == "first":
            return (0, pp - 1) if tensor.tied_last and pp > 1 else (0,)
        if tensor.stage == "last":
            return (pp - 1,)
        stages = _stages_of_layers(self, pp)
        if not 0 <= tensor.stage < len(stages):
            raise ConfigError(f"tensor {tensor.name} names layer {tensor.stage} of {self.layers}")
        return (stages[tensor.stage],)

    def stage_tensors(self, pp: int, stage: int) -> tuple[int, ...]:
        """Indices of a stage's tensors in the order of its `module.parameters()`.

        A tied copy comes last on the last stage (Megatron's output_layer).
        """
        return _tensors_of_stages(self, pp)[stage]

    def element_bytes(self, kind: str) -> int:
        return self.parameter_bytes if kind == PARAMETER else 4


@lru_cache(maxsize=256)
def _stages_of_layers(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """The stage of every layer."""
    counts = model.stage_layers(pp)
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


@lru_cache(maxsize=256)
def _tensors_of_stages(model: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    """The tensors of every stage; see `ModelSpec.stage_tensors`."""
    held: list[list[int]] = [[] for _ in range(pp)]
    stages = [model.stages_of(tensor, pp) for tensor in model.tensors]
    for index, (stage, *_) in enumerate(stages):
        held[stage].append(index)
    for index, (_, *others) in enumerate(stages):
        for stage in others:
            held[stage].append(index)
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
