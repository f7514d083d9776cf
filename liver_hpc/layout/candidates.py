"""`layouts: auto`: the layouts that a run can take, those expected to be fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from liver_hpc.config.schema import AUTO, LayoutSection, RunConfig, TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.batch import batch_fault
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.memory import worker_bytes
from liver_hpc.layout.tensors import ModelSpec

NEAREST = 4
"""How many layouts an error explains."""


class StepTerms(NamedTuple):
    """What the time of a step is made of; see `step_terms`."""

    compute: float
    tensor: float
    data: float
    fixed: float

    def cost(self, weights: StepTerms) -> float:
        return sum(term * weight for term, weight in zip(self, weights, strict=True))


PRIOR = StepTerms(compute=1.0, tensor=0.3, data=0.25, fixed=0.01)
"""Weights before anything was measured, relative to all the computing of a step on one worker.

tensor: all-reduces inside of a node take about a third of the time of the layers they belong to.
data: reducing all gradients costs a quarter of computing one micro-batch; below 1, so that dp comes
before pp. fixed: launches and the optimizer's bookkeeping, which no further worker shares.
"""


def step_terms(layout: Layout, train: TrainSection) -> StepTerms:
    """How a layout shares the work of one step; smaller is faster.

    With M micro-batches a step in all, m = M / dp of them a pipeline, and the pipeline's bubble
    factor b = 1 + (pp - 1) / m:

        compute = b / (tp pp dp)            each worker's share of the computing
        tensor  = b (tp - 1) / tp / (pp dp) all-reduces of a stage's layers: tp does not share them
        data    = (dp - 1) / dp / (tp pp M) gradients and parameters of a stage, once a step
        fixed   = 1                         what every step costs
    """
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    micro_batches = train.global_batch / train.micro_batch
    bubble = 1 + (pp - 1) * dp / micro_batches
    return StepTerms(
        compute=bubble / layout.workers,
        tensor=bubble * (tp - 1) / tp / (pp * dp),
        data=(dp - 1) / dp / (tp * pp * micro_batches),
        fixed=1.0,
    )


def expected_order(layout: Layout, train: TrainSection) -> tuple[float, int, int, int]:
    """Sorts layouts of equally many workers, the one expected to be fastest first.

    Least communication comes first: data parallelism, then pipelines while the bubble is small,
    then tensor parallelism.
    """
    return (step_terms(layout, train).cost(PRIOR), -layout.dp, layout.pp, layout.tp)


def workers_of_a_node(config: RunConfig) -> int | None:
    """The fewest workers that a node of the run has; None where nodes have no bound.

    A local run has all its workers on one machine, whatever `cluster.workers_per_node` says, which
    is how many one agent starts.
    """
    cluster = config.cluster
    if cluster.kind == "local":
        return None
    slurm = cluster.slurm
    known = [cluster.slots(component) for component in slurm.components]
    if slurm.burst is not None:
        known.append(cluster.slots(slurm.burst))
    return min(known, default=cluster.workers_per_node)


@dataclass(frozen=True)
class Candidates:
    """Judges layouts for one run and one model.

    check_layout: raises ConfigError for a layout that the model cannot have.
    """

    config: RunConfig
    model: ModelSpec
    check_layout: Callable[[Layout], None]

    def fault(self, layout: Layout) -> str:
        """Why the run cannot take a layout; empty when it can."""
        if fault := batch_fault(self.config.train, layout):
            return fault
        node = workers_of_a_node(self.config)
        if node is not None and layout.tp > node:
            return f"tp={layout.tp} is more than the {node} workers of a node"
        if layout.tp > 1 and all(tensor.tp_dim is None for tensor in self.model.tensors):
            return "no tensor of the model is split over tp"
        try:
            self.check_layout(layout)
        except ConfigError as error:
            return str(error)
        return memory_fault(self.config, self.model, layout)

    def table(self) -> dict[int, list[Layout]]:
        """All layouts that the run can take by worker count, those expected fastest first."""
        fitting = (each for each in layouts_up_to(self.config.workers.max) if not self.fault(each))
        found: dict[int, list[Layout]] = {}
        for layout in self._in_order(fitting):
            found.setdefault(layout.workers, []).append(layout)
        return found

    def why_none(self, workers: int) -> str:
        """Why the best few layouts of `workers` workers cannot be taken."""
        nearest = (each for each in layouts_up_to(workers) if each.workers == workers)
        some = self._in_order(nearest)[:NEAREST]
        return "; ".join(f"{layout}: {self.fault(layout)}" for layout in some)

    def _in_order(self, layouts: Iterable[Layout]) -> list[Layout]:
        train = self.config.train
        return sorted(layouts, key=lambda each: (each.workers, expected_order(each, train)))


def layouts_up_to(workers: int) -> Iterator[Layout]:
    """Every layout of at most `workers` workers."""
    for tp in range(1, workers + 1):
        for pp in range(1, workers // tp + 1):
            for dp in range(1, workers // (tp * pp) + 1):
                yield Layout(tp, pp, dp)


def fullest_worker(model: ModelSpec, layout: Layout) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, by kind, of a layout's fullest worker.

    Exact to within the padding between the optimizer's parameters.
    """
    # On one stage every tp rank holds as much, and every dp rank as much of each bucket.
    seats = [Coordinate(0, stage, 0) for stage in range(layout.pp)]
    return max((worker_bytes(model, layout, seat) for seat in seats), key=lambda b: sum(b.values()))


def memory_fault(config: RunConfig, model: ModelSpec, layout: Layout) -> str:
    """Why a layout is too large for `policy.memory_bytes`; empty when it is not.

    It counts one world's state and staging; neither activations nor the second world that a worker
    holds during a handoff.
    """
    most = config.policy.memory_bytes
    if most is None:
        return ""
    held = sum(fullest_worker(model, layout).values())
    staging = config.handoff.staging_bytes
    if held + staging <= most:
        return ""
    return (
        f"its fullest worker holds {held} bytes and {staging} for staging, "
        f"more than policy.memory_bytes {most}"
    )


def resolve_layouts(
    config: RunConfig, model: ModelSpec, check_layout: Callable[[Layout], None]
) -> RunConfig:
    """The run with `layouts: auto` written out as a table, and `policy.layout` set to auto.

    It leaves a table that the run file gives as it is. Raises ConfigError when no layout can be
    taken with `workers.initial` workers.
    """
    if config.layouts != AUTO:
        return config
    candidates = Candidates(config, model, check_layout)
    table, initial = candidates.table(), config.workers.initial
    if initial not in table:
        counts = ", ".join(map(str, table)) or "none"
        raise ConfigError(
            f"layouts: auto finds nothing for workers.initial = {initial} (worker counts with a "
            f"layout: {counts}): {candidates.why_none(initial)}"
        )
    layouts = {
        count: [LayoutSection.of(entry) for entry in entries] for count, entries in table.items()
    }
    policy = config.policy.model_copy(update={"layout": AUTO})
    return config.model_copy(update={"layouts": layouts, "policy": policy})
