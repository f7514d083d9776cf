"""The run file's schema: frozen pydantic models, every key with its unit and default.

`configs/reference.yaml` lists the same keys with comments; a test keeps the two equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from liver_hpc.layout.coordinates import Layout

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(gt=0, strict=True)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayoutSection(Section):
    """Sizes of the mesh axes; an axis left out is 1."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    dp: PositiveInt = 1

    def layout(self) -> Layout:
        return Layout(self.tp, self.pp, self.dp)


class OptimizerSection(Section):
    """Adam with decoupled weight decay, as Megatron's distributed optimizer runs it."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    min_lr: Annotated[float, Field(ge=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0


class ScheduleSection(Section):
    """Learning rate as a function of the step alone (Megatron's OptimizerParamScheduler)."""

    style: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None


class DataSection(Section):
    """Where tokens come from: an existing `.bin/.idx` pair, or text files to tokenize by bytes."""

    prefix: Path | None = None
    text: list[str] | Literal["python-stdlib"] | None = None
    directory: Path = Path("data")
    max_text_bytes: Bytes = 16 * 2**20
    seed: NonNegativeInt = 1234

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        if (self.prefix is None) == (self.text is None):
            raise ValueError("exactly one of data.prefix and data.text must be given")
        return self


class TrainSection(Section):
    """Length of the run and the batch; the global batch is the same for every layout."""

    steps: PositiveInt
    global_batch: PositiveInt
    micro_batch: PositiveInt = 1
    seed: NonNegativeInt = 1234


class WorkersSection(Section):
    """How many workers the run starts with and may ever have."""

    initial: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> WorkersSection:
        if self.initial > self.max:
            raise ValueError(f"workers.initial is {self.initial}, more than workers.max {self.max}")
        return self


class NoticeSection(Section):
    """A scripted reason to change, raised when step `at_step` has been done."""

    at_step: NonNegativeInt
    layout: LayoutSection | None = None
    workers: PositiveInt | None = None
    replace: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _one_wish(self) -> NoticeSection:
        wishes = [n for n in ("layout", "workers", "replace") if getattr(self, n) is not None]
        if len(wishes) != 1:
            raise ValueError(f"wanted exactly one of layout, workers, replace; got {wishes}")
        return self


class HandoffSection(Section):
    """How state moves from the source world to the target world."""

    staging_bytes: Bytes = 64 * 2**20
    bucket_bytes: Bytes = 4 * 2**20
    warm_up: bool = True
    keep_groups: bool = True


class DeadlineSection(Section):
    """The longest wait of every kind, in seconds; each error names whom it waited for."""

    boot_s: Seconds = 180.0
    meet_s: Seconds = 30.0
    prepare_s: Seconds = 180.0
    boundary_s: Seconds = 300.0
    transfer_s: Seconds = 120.0
    release_s: Seconds = 60.0
    collective_s: Seconds = 300.0
    control_s: Seconds = 30.0
    heartbeat_s: Seconds = 30.0
    exit_s: Seconds = 10.0


class ClusterSection(Section):
    """Where workers run; `auto` means Slurm where `sbatch` is found, else local processes."""

    kind: Literal["auto", "local", "slurm"] = "auto"
    workers_per_node: PositiveInt | None = None
    timeout_min: PositiveInt = 60


class NetworkSection(Section):
    """Which network interface control traffic and collectives use."""

    interface: str | None = None


class MetricsSection(Section):
    """The HDF5 file; writing pauses when the disk has less than `reserve_bytes` left."""

    reserve_bytes: NonNegativeInt = 16 * 2**20
    flush_interval_s: Seconds = 1.0


class RunConfig(Section):
    """One file = one whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    runs_directory: Path = Path("runs")
    recipe: str = "liver_hpc.recipes.gpt:GPT"
    model: dict[str, Any] = Field(default_factory=dict)
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    data: DataSection | None = None
    train: TrainSection
    workers: WorkersSection
    layouts: dict[PositiveInt, list[LayoutSection]]
    notices: list[NoticeSection] = []
    handoff: HandoffSection = HandoffSection()
    deadlines: DeadlineSection = DeadlineSection()
    cluster: ClusterSection = ClusterSection()
    network: NetworkSection = NetworkSection()
    metrics: MetricsSection = MetricsSection()

    @field_validator("layouts", mode="before")
    @classmethod
    def _one_layout_or_many(cls, value: Any) -> Any:
        """`4: {tp: 2, dp: 2}` means a list of one."""
        if not isinstance(value, dict):
            return value
        return {k: v if isinstance(v, list) else [v] for k, v in value.items()}

    def allowed_layouts(self, workers: int) -> list[Layout]:
        """Layouts that the run file allows for a worker count, the preferred one first."""
        return [entry.layout() for entry in self.layouts.get(workers, [])]
