"""The run file's schema: frozen pydantic models, every key with its unit and default.

`configs/reference.yaml` lists the same keys with comments; a test keeps the two equal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]  # as NumPy takes it
Seconds = Annotated[float, Field(gt=0, le=1e6)]  # a wait of 24.8 days is too long for poll
Bytes = Annotated[int, Field(gt=0, strict=True)]


_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_EXPANDED = re.compile(r"\$[\w{(@*]")
"""What a shell puts something in the place of."""


def as_written(text: str, where: str = "") -> str:
    """The text; raises ValueError for one that a shell would make another of, after `where`."""
    if _EXPANDED.search(text):
        raise ValueError(f"{where}{text!r}: $ is not expanded here; write what it stands for")
    return text


class Section(BaseModel):
    """Frozen; an unknown key is an error, and so is a number without bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _has_a_home(cls, value: Any) -> Any:
        """`~name/...` is of a user that there is, and nothing else in a path is expanded. One with
        a line end, as of a block of YAML, is no word of a command line."""
        if isinstance(value, Path):
            if _CONTROLS.search(str(value)):
                raise ValueError(f"wanted a path, got {str(value)!r}")
            as_written(str(value))
            try:
                value.expanduser()
            except RuntimeError:
                raise ValueError(f"there is no home directory {value.parts[0]!r}") from None
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """`yes` and `on` of YAML would count as 1, and no path as the current directory."""
        if isinstance(value, bool) or value == "":
            kinds = {*_kinds_of(cls.model_fields[str(info.field_name)].annotation)}
            if value == "" and Path in kinds:
                raise ValueError("wanted a path, got ''")
            if isinstance(value, bool) and float in kinds and bool not in kinds:
                raise ValueError(f"wanted a number, got {str(value).lower()}")
        return value


def _kinds_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds_of(part)


class LayoutSection(Section):
    """Sizes of the mesh axes; an axis left out is 1."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    dp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    vpp: PositiveInt = 1
    sequence_parallel: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> LayoutSection:
        try:
            self.layout()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def layout(self) -> Layout:
        return Layout(**self.model_dump())

    @classmethod
    def of(cls, layout: Layout) -> LayoutSection:
        return cls(**asdict(layout))


class OptimizerSection(Section):
    """Adam with decoupled weight decay, as Megatron's distributed optimizer runs it."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    min_lr: Annotated[float, Field(ge=0)] = 1e-4
    decoupled_lr: Annotated[float, Field(ge=0)] | None = None
    decoupled_min_lr: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _decoupled(self) -> OptimizerSection:
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise ValueError("decoupled_min_lr wants decoupled_lr: Megatron does not use it alone")
        return self


class ScheduleSection(Section):
    """Learning rate as a function of the step alone (Megatron's OptimizerParamScheduler). Steps are
    of `train.global_batch` samples, and may be broken: jobs that count samples have such."""

    style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"
    warmup_steps: Annotated[float, Field(ge=0)] = 0
    warmup_init: Annotated[float, Field(ge=0)] = 0
    decay_steps: Annotated[float, Field(gt=0)] | None = None
    wsd_decay_steps: Annotated[float, Field(gt=0)] | None = None
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"


class BlendSection(Section):
    """One source of a blend: an existing `.bin/.idx` pair, and its weight beside the others'."""

    prefix: Path
    weight: Annotated[float, Field(gt=0)] = 1.0


class DataSection(Section):
    """Where tokens come from: an existing `.bin/.idx` pair, a blend of several, or text files to
    tokenize by bytes."""

    prefix: Path | None = None
    blend: Annotated[list[BlendSection], Field(min_length=1)] | None = None
    text: list[str] | Literal["python-stdlib"] | None = None
    split: Annotated[str, Field(pattern=r"^\d+(\.\d*)?(,\d+(\.\d*)?){0,2}$")] | None = None
    directory: Path = Path("data")
    max_text_bytes: Bytes = 16 * 2**20
    seed: Seed = 1234

    @property
    def shares(self) -> tuple[float, ...]:
        """Of training, validation and test, as `split` has them: numbers, in proportion."""
        given = [] if self.split is None else [float(share) for share in self.split.split(",")]
        return (*(given or [1.0]), 0.0, 0.0)[:3]

    @field_validator("split")
    @classmethod
    def _train_on_some(cls, split: str | None) -> str | None:
        if split is not None and float(split.split(",")[0]) <= 0:
            raise ValueError(f"the first share is that of training, wanted more than 0: {split}")
        return split

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        sources = (self.prefix, self.blend, self.text)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("exactly one of data.prefix, data.blend and data.text must be given")
        return self


class RampupSection(Section):
    """A global batch that grows, as with Megatron-LM's `--rampup-batch-size`."""

    start: PositiveInt
    increment: PositiveInt
    samples: PositiveInt


class TrainSection(Section):
    """Length of the run and the batch; the global batch of a step is the same for every layout.
    With `rampup` it grows to `global_batch` (`layout/ramp.py`), which validation has throughout."""

    steps: PositiveInt
    global_batch: PositiveInt
    rampup: RampupSection | None = None
    micro_batch: PositiveInt = 1
    seed: Seed = 1234
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_elements: PositiveInt = 40_000_000
    grad_reduce_in_bf16: bool = False
    read_ahead: NonNegativeInt = 4
    verify_every_steps: PositiveInt | None = None
    stop_every_steps: PositiveInt | None = None

    def last_step(self, begun: int) -> int:
        """How many steps are done where a run ends that goes on after `begun`."""
        every = self.stop_every_steps
        return self.steps if every is None else min(self.steps, (begun // every + 1) * every)

    @model_validator(mode="after")
    def _overlap(self) -> TrainSection:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather wants overlap_grad_reduce too, as Megatron does")
        return self

    @model_validator(mode="after")
    def _ramp(self) -> TrainSection:
        ramp = self.rampup
        if ramp is None:
            return self
        grows = self.global_batch - ramp.start
        if grows <= 0:
            raise ValueError(
                f"rampup.start is {ramp.start}, wanted less than global_batch, {self.global_batch}"
            )
        if grows % ramp.increment:
            raise ValueError(
                f"rampup.increment is {ramp.increment}, which does not divide global_batch - "
                f"rampup.start = {self.global_batch} - {ramp.start} = {grows}"
            )
        return self


class EvalSection(Section):
    """Validation loss, every so many steps, over `steps` global batches of the validation set."""

    every_steps: PositiveInt
    steps: PositiveInt

    def batches_after(self, step: int) -> range:
        """The validation batches, by their numbers in the whole run, that are evaluated once so
        many steps are done; empty where no evaluation is due."""
        number, since = divmod(step, self.every_steps)
        if since or not number:
            return range(0)
        return range((number - 1) * self.steps, number * self.steps)


class WorkersSection(Section):
    """How many workers the run starts with and may ever have, and how they start."""

    initial: PositiveInt
    max: PositiveInt
    warm: bool = True
    standby: NonNegativeInt = 0
    bind: Literal["auto", "none"] = "auto"

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
    def _one_request(self) -> NoticeSection:
        asked = [n for n in ("layout", "workers", "replace") if getattr(self, n) is not None]
        if len(asked) != 1:
            raise ValueError(f"wanted exactly one of layout, workers, replace; got {asked}")
        return self


class HandoffSection(Section):
    """How state moves from the source world to the target world."""

    staging_bytes: Bytes = 64 * 2**20
    bucket_bytes: Bytes = 4 * 2**20
    memory: Literal["both", "bounded"] = "both"
    direct: bool = True
    warm_up: bool = True
    warm_up_again: bool = False
    keep_groups: bool = True
    take_over: bool = True
    overlap: Literal["auto", "always", "never"] = "auto"
    digests: Literal["moved", "whole"] = "moved"


class DeadlineSection(Section):
    """The longest wait of every kind, in seconds; each error names whom it waited for.

    `coordinator_s`: how long workers go on without a coordinator; it beats the others where they
    wait for its word.
    """

    health_s: Seconds = 60.0
    derive_s: Seconds = 900.0
    boot_s: Seconds = 180.0
    meet_s: Seconds = 30.0
    prepare_s: Seconds = 180.0
    boundary_s: Seconds = 300.0
    evaluation_s: Seconds = 600.0
    transfer_s: Seconds = 120.0
    checkpoint_s: Seconds = 3600.0
    release_s: Seconds = 60.0
    collective_s: Seconds = 300.0
    control_s: Seconds = 30.0
    coordinator_s: Seconds = 120.0
    heartbeat_s: Seconds = 30.0
    step_s: Seconds | None = None
    exit_s: Seconds = 10.0

    def beside_steps(self, steps_s: float) -> DeadlineSection:
        """Of a handoff whose boundary and target's first step may take so many seconds: no wait
        that they lie in ends before them."""
        more = {
            "boundary_s": self.boundary_s + steps_s,
            "transfer_s": self.transfer_s + steps_s,
        }
        return self.model_copy(update=more)

    @property
    def successor_s(self) -> float:
        """The longest that a run goes on without a coordinator where the next one shows that it
        begins."""
        return self.boot_s + self.coordinator_s

    @property
    def word_s(self) -> float:
        """The longest that a worker waits for a word of the coordinator's, or of the next one's.
        Where there is none to come, its agent ends it before."""
        return self.control_s + self.successor_s


_OWN_OPTIONS = {
    "cpus-per-task": "cpus_per_node",
    "gpus": "gpus_per_node",
    "gpus-per-node": "gpus_per_node",
    "gpus-per-socket": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "job-name": "name",
    "no-requeue": "cluster.slurm.requeue",
    "nodes": "nodes",
    "ntasks": "workers_per_node",
    "ntasks-per-node": "workers_per_node",
    "partition": "partition",
    "requeue": "cluster.slurm.requeue",
    "signal": "cluster.slurm.end_window_s",
    "time": "cluster.timeout_min, or time_min of a burst",
}
"""Options of sbatch that liver gives itself, and the key that says what it gives."""
_KEYLESS = re.compile(
    "array|comment|error|hold|no-kill|open-mode|output|parsable|test-only|wait|wrap"
)
"""More of them, of which no key says anything."""
_OTHER_CLUSTER = (
    "liver submits to the cluster of Slurm's configuration; for another one submit "
    "slurm/liver.sbatch by `sbatch -M CLUSTER`, or set SLURM_CONF to that one's"
)
_APPTAINER_CLEARS = {"-e", "--cleanenv", "-C", "--containall", "--compat"}
_GPUS_AMONG_OTHERS = re.compile(r"(^|[,:/])gpu([,:=]|$)")
"""In a list of generic resources, as "nvme:1,gpu:h100:8" and "cpu=4,gres/gpu=1"."""
_OWN_STEP_OPTIONS = {
    "container-image": "cluster.slurm.container.image",
    "container-mounts": "cluster.slurm.container.mounts",
    "gpus-per-node": "gpus_per_node of a component or a burst",
}
"""The same of srun, where it starts an agent."""
_KEYLESS_OF_STEPS = re.compile(
    "cpu-bind|error|het-group|immediate|input|job-name|jobid|kill-on-bad-exit|mpi|multi-prog"
    "|no-kill|nodelist|nodes|ntasks|ntasks-per-node|output|overlap|unbuffered|verbose|wait"
)


def _plain(text: str) -> str:
    """Of a batch script's line: a line end in it would begin another."""
    if not (text.strip() and text.isprintable()):
        raise ValueError(f"{text!r} is empty or has control characters")
    return text


def _without_home(text: str) -> str:
    if text.startswith("~"):
        raise ValueError(f"{text!r}: ~ is not expanded here; write what it stands for")
    return text


def _words(text: str) -> str:
    """Of a command line, split as a shell would."""
    try:
        program = shlex.split(_plain(text))[0]
    except ValueError as error:
        raise ValueError(f"{text!r} is no command line: {error}") from None
    as_written(_without_home(program))
    return text


def _not_ours(keys: Mapping[str, str], keyless: re.Pattern[str], where: str) -> AfterValidator:
    """Refuses the options that liver gives itself, in words."""

    def checked(name: str) -> str:
        if name in ("cluster", "clusters"):
            raise ValueError(f"--{name}: {_OTHER_CLUSTER}")
        if name in keys:
            raise ValueError(f"liver gives --{name} itself; its key is {keys[name]}")
        if keyless.fullmatch(name):
            raise ValueError(f"liver gives --{name} itself{where}")
        return name

    return AfterValidator(checked)


def _runtime_option(word: str) -> str:
    if not word.startswith("-"):
        raise ValueError(f"wanted one word as --rocm or --env=NAME=VALUE, got {word!r}")
    return _plain(word)


def _mount(text: str) -> str:
    paths = as_written(_plain(text)).split(":")
    if len(paths) > 2 or "," in text or not all(path.startswith("/") for path in paths):
        raise ValueError(
            f"wanted /PATH or /PATH:/PATH_IN_IMAGE without commas, got {text!r}; other words of a "
            "runtime's mounts go into options"
        )
    return text


def _option_value(value: str | int | bool) -> str | int | bool:
    if value is False:
        raise ValueError("wanted a value, or true for none; leave it out instead")
    return _plain(value) if isinstance(value, str) else value


def _without_gpus(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Refuses GPUs in lists of resources: workers would not be counted by them."""
    for name in ("gres", "tres-per-task"):
        if _GPUS_AMONG_OTHERS.search(asked := str(options.get(name, ""))):
            raise ValueError(f"liver gives --{name}={asked} itself; its key is gpus_per_node")
    return options


def _with_all(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Refuses an environment by which agents are not found to be killed."""
    if str(options.get("export", "ALL")).upper().partition(",")[0] != "ALL":
        raise ValueError("--export without ALL keeps from agents by what they are found; ALL,A=B")
    return options


PlainText = Annotated[str, AfterValidator(_plain)]
CommandLine = Annotated[str, AfterValidator(_words)]
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z-]*$")]
OptionValue = Annotated[str | int | bool, AfterValidator(_option_value)]
_SbatchOption = Annotated[OptionName, _not_ours(_OWN_OPTIONS, _KEYLESS, "")]
SbatchOptions = Annotated[dict[_SbatchOption, OptionValue], AfterValidator(_without_gpus)]
"""Further options of sbatch by their long names, without dashes; true means without a value."""
_of_steps = _not_ours(_OWN_STEP_OPTIONS, _KEYLESS_OF_STEPS, " to the steps of agents")
StepOptions = Annotated[
    dict[Annotated[OptionName, _of_steps], OptionValue], AfterValidator(_with_all)
]
"""The same of srun, for the steps of agents."""


_GPUS = re.compile(r"[A-Za-z][\w.-]*:([1-9]\d*)", re.ASCII)


def gpu_count(gpus: int | str) -> int:
    """Of "h100:4" 4; of a number itself."""
    return gpus if isinstance(gpus, int) else int(gpus.rpartition(":")[2])


def checked_gpus(gpus: object) -> int | str:
    """As Slurm takes them. Raises ValueError for what is no number of GPUs, with or without their
    type."""
    if type(gpus) is int and gpus >= 0:
        return gpus
    if isinstance(gpus, str) and _GPUS.fullmatch(gpus):
        return gpus
    raise ValueError(f"wanted a number of GPUs, or TYPE:NUMBER such as h100:4; got {gpus!r}")


Gpus = Annotated[int | str, BeforeValidator(checked_gpus)]
"""GPUs of a node: how many, or TYPE:NUMBER as Slurm's --gpus-per-node takes it."""


class ComponentSection(Section):
    """One component of the heterogeneous job: nodes of one kind, held from start to end. The first
    one hosts the coordinator, and is used from the start."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    partition: PlainText | None = None
    nodes: PositiveInt = 1
    workers_per_node: PositiveInt | None = None
    join: Literal["auto", "asked"] = "auto"
    gpus_per_node: Gpus = 0
    cpus_per_node: PositiveInt | None = None
    options: SbatchOptions = {}


class BurstSection(Section):
    """Preemptible allocations of their own, asked for and given back while the run goes on."""

    partition: PlainText
    max_nodes: PositiveInt
    min_nodes: NonNegativeInt = 0
    nodes_per_request: PositiveInt = 1
    workers_per_node: PositiveInt | None = None
    gpus_per_node: Gpus = 0
    cpus_per_node: PositiveInt | None = None
    time_min: PositiveInt = 60
    node_hours: Annotated[float, Field(gt=0)] | None = None
    backoff_s: Seconds = 5.0
    backoff_max_s: Seconds = 300.0
    options: SbatchOptions = {}


class ContainerSection(Section):
    """The image that agents and workers run in; the coordinator runs on the host. `options` are of
    `srun` for pyxis, of `apptainer exec`, of `ch-run`."""

    runtime: Literal["pyxis", "apptainer", "charliecloud"]
    image: Annotated[PlainText, AfterValidator(_without_home)]
    mounts: list[Annotated[str, AfterValidator(_mount)]] = []
    python: CommandLine = "python3"
    options: list[Annotated[str, AfterValidator(_runtime_option)]] = []

    @model_validator(mode="after")
    def _keeps_environment(self) -> ContainerSection:
        """Agents learn from it on which node they are, and are found by it to be killed."""
        cleared = [*_APPTAINER_CLEARS.intersection(self.options)]
        if self.runtime == "apptainer" and cleared:
            raise ValueError(
                f"options: {cleared[0]} keeps from agents what Slurm tells them; --no-home "
                "leaves the environment as it is"
            )
        return self


class SlurmSection(Section):
    """How the run uses a Slurm cluster."""

    account: PlainText | None = None
    qos: PlainText | None = None
    components: list[ComponentSection] = []
    burst: BurstSection | None = None
    setup: list[str] = []
    python: CommandLine | None = None
    step_options: StepOptions = {}
    container: ContainerSection | None = None
    requeue: bool | Literal["expedite"] = True
    end_window_s: Seconds = 120.0
    poll_s: Seconds = 5.0
    command_s: Seconds = 30.0
    unreachable_s: Seconds = 300.0


class ClusterSection(Section):
    """Where workers run."""

    kind: Literal["auto", "local", "slurm"] = "auto"
    workers_per_node: PositiveInt | None = None
    timeout_min: PositiveInt = 60
    health_check: PlainText | None = None
    slurm: SlurmSection = SlurmSection()

    @property
    def parts(self) -> list[ComponentSection | BurstSection]:
        """Of the nodes that a run on Slurm may have."""
        return [*self.slurm.components, *([self.slurm.burst] if self.slurm.burst else [])]

    def wanted_gpus(self, place: int) -> int:
        """GPUs that each node is asked for with, at least, that has such a place for a worker."""
        parts = [part for part in self.parts if self.kind == "slurm" and self.slots(part) > place]
        return min((gpu_count(part.gpus_per_node) for part in parts), default=0)

    def slots(self, part: ComponentSection | BurstSection) -> int:
        """Workers that one node of a component or of a burst allocation takes."""
        return part.workers_per_node or self.workers_per_node or gpu_count(part.gpus_per_node) or 1


class StragglersSection(Section):
    """When a node counts as a straggler."""

    factor: Annotated[float, Field(gt=1)] = 1.5
    for_s: Seconds = 60.0
    drain: bool = False


class PolicySection(Section):
    """How the coordinator answers to nodes that come and go."""

    layout: Literal["table", "auto"] = "table"
    memory_bytes: Bytes | None = None
    settle_s: Seconds = 2.0
    retry_s: Seconds = 10.0
    drain_window_s: Seconds = 600.0
    horizon_s: Seconds = 1800.0
    observe: bool = False
    stragglers: StragglersSection | None = StragglersSection()


class CheckpointSection(Section):
    """State on disk, for the day that everything ends: read once, by the run that follows."""

    directory: Path | None = None
    load: Path | None = None
    weights: Path | None = None
    every_steps: PositiveInt | Literal["auto"] | None = "auto"
    cost: Annotated[float, Field(gt=0, le=1)] = 0.05
    keep: PositiveInt | None = 2

    @property
    def goes_on_from_others(self) -> bool:
        """Whether a run begins with whatever lies where it saves, as a job whose --load is its
        --save."""
        load, directory = self.load, self.directory
        if load is None or directory is None:
            return False
        return load.expanduser().resolve() == directory.expanduser().resolve()


class SnapshotSection(Section):
    """Second copies of the state in the memory of other nodes, from which training goes on when a
    worker is lost."""

    every_steps: PositiveInt | Literal["auto"] | None = None
    cost: Annotated[float, Field(gt=0, le=1)] = 0.01


InterfaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")]
NcclVariables = dict[Annotated[str, Field(pattern=r"^NCCL_[A-Z0-9_]+$")], str | int]


class NetworkSection(Section):
    """Interfaces and adapters; what is not given comes from the environment, or is detected."""

    interface: InterfaceName | None = None
    nccl_interface: Annotated[str, Field(min_length=1)] | None = None
    gloo_interface: Annotated[str, Field(min_length=1)] | None = None
    ib_hca: Annotated[str, Field(min_length=1)] | None = None
    mpi_netmod: Literal["ofi", "ucx"] | None = None
    nccl: NcclVariables = {}


class TensorBoardSection(Section):
    """Event files."""

    directory: Path | None = None


class WandbSection(Section):
    """Weights & Biases; its key, and whether it is online, are the environment's."""

    project: PlainText
    entity: PlainText | None = None


class OpenMetricsSection(Section):
    """An endpoint `/metrics`, for who has the token; port 0: one that is free."""

    host: PlainText = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 0


class TrackingSection(Section):
    """Where a run is followed beside `liver status`; null: not there."""

    tensorboard: TensorBoardSection | None = None
    wandb: WandbSection | None = None
    openmetrics: OpenMetricsSection | None = None


AUTO: Literal["auto"] = "auto"

LayoutTable = dict[PositiveInt, list[LayoutSection]]
LayoutsOrAuto = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[LayoutTable, Tag("table")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "table"),
]


def own_recipe_directory(recipe: str, given: Path | None) -> Path | None:
    """Where a recipe that is not liver_hpc's is looked for: the current directory unless the run
    file names one."""
    return None if recipe.startswith("liver_hpc.") else (given or Path()).expanduser().absolute()


class RunConfig(Section):
    """One file = one whole run.

    `layouts` is "auto" only between loading and `layout.candidates.resolve_layouts`; whoever
    launches or runs a run finds a table.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    runs_directory: Path = Path("runs")
    recipe: str = "liver_hpc.recipes.gpt:GPT"
    recipe_directory: Path | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    data: DataSection | None = None
    train: TrainSection
    eval: EvalSection | None = None
    workers: WorkersSection
    layouts: LayoutsOrAuto
    notices: list[NoticeSection] = []
    handoff: HandoffSection = HandoffSection()
    deadlines: DeadlineSection = DeadlineSection()
    cluster: ClusterSection = ClusterSection()
    policy: PolicySection = PolicySection()
    checkpoint: CheckpointSection = CheckpointSection()
    snapshots: SnapshotSection = SnapshotSection()
    network: NetworkSection = NetworkSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_constant_now(cls, value: Any) -> Any:
        """A run's directory has all keys with their values: runs of before would have an unknown
        one, and could not be resumed."""
        if isinstance(value, dict) and value.get("metrics") == {"reserve_bytes": 16 * 2**20}:
            return {key: each for key, each in value.items() if key != "metrics"}
        return value

    @field_validator("layouts", mode="before")
    @classmethod
    def _one_layout_or_many(cls, value: Any) -> Any:
        """`4: {tp: 2, dp: 2}` means a list of one."""
        if not isinstance(value, dict):
            return value
        return {k: v if isinstance(v, list) else [v] for k, v in value.items()}

    @property
    def own_recipe_directory(self) -> Path | None:
        """Where a recipe that is not liver_hpc's is looked for when it is not installed."""
        return own_recipe_directory(self.recipe, self.recipe_directory)

    @property
    def limits(self) -> DeadlineSection:
        """The deadlines of this run: before a boundary an evaluation may come, and before a boot
        a check of the node."""
        given, more = self.deadlines, {}
        if self.eval is not None:
            more["boundary_s"] = given.boundary_s + given.evaluation_s
        if self.cluster.health_check is not None:
            more["boot_s"] = given.boot_s + given.health_s
        return given.model_copy(update=more)

    @property
    def layout_table(self) -> LayoutTable:
        """`layouts` by number of workers; raises ConfigError while it is still "auto"."""
        if isinstance(self.layouts, str):
            raise ConfigError("layouts is 'auto': wanted the table that `liver submit` makes of it")
        return self.layouts

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers that have an entry in `layouts`, ascending."""
        return sorted(self.layout_table)

    @property
    def layouts_listed(self) -> list[Layout]:
        """All layouts of the table."""
        return [one for count in self.worker_counts for one in self.allowed_layouts(count)]

    def allowed_layouts(self, workers: int) -> list[Layout]:
        """Layouts that the run file allows for a worker count, the preferred one first."""
        return [entry.layout() for entry in self.layout_table.get(workers, [])]
