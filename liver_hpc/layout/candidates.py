"""`layouts: auto`: the layouts that a run can take, those expected to be fastest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from liver_hpc.config.schema import AUTO, LayoutSection, RunConfig, TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.batch import batch_fault, most_micro_batches
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ramp import batches_of
from liver_hpc.layout.tensors import ModelSpec

NEAREST = 4
"""How many layouts an error explains."""
KEPT = 6
"""How many layouts are kept for one number of workers, those expected to be fastest."""
WORTH = 0.005
"""A number of workers that is no multiple of a node's is kept where it is expected to be faster by
more than this share than all smaller ones."""


class StepTerms(NamedTuple):
    """What the time of a step is made of; see `step_terms`."""

    compute: float
    tensor: float
    data: float
    fixed: float
    context: float = 0.0
    experts: float = 0.0

    def cost(self, weights: StepTerms) -> float:
        return sum(term * weight for term, weight in zip(self, weights, strict=True))


PRIOR = StepTerms(compute=1.0, tensor=0.3, data=0.25, fixed=0.01, context=0.1, experts=0.3)
"""Weights before anything was measured, relative to all the computing of a step on one worker.

tensor: all-reduces inside of a node take about a third of the time of the layers they belong to.
data: reducing all gradients costs a quarter of computing one micro-batch; below 1, so that dp comes
before pp. fixed: launches and the optimizer's bookkeeping, which no further worker shares. context:
keys and values go round while attention computes. experts: each token goes to its experts' workers
and back.
"""


def step_terms(layout: Layout, train: TrainSection, batch: int | None = None) -> StepTerms:
    """How a layout shares the work of one step; smaller is faster.

    batch: samples of the step; None: `train.global_batch`, whose work is the unit of all batches.
    With M micro-batches in that, m of the step's in the pipeline that has most, and s = (m + (pp -
    1) / vpp) / M, the micro-batches that pass by until that one is done:

        compute = s / (tp pp cp)                a worker's share of the computing
        tensor  = s (tp - 1) / tp / (pp cp)     all-reduces of its layers: tp does not share them
        data    = (r - 1) / r / (tp pp M)       gradients and parameters of a stage, once a step,
                                                of r = dp cp replicas
        fixed   = 1                             what every step costs
        context = s (cp - 1) / cp / (tp pp)     keys and values of the other chunks
        experts = s (ep - 1) / ep / (tp pp cp)  tokens to experts elsewhere, and back
    """
    tp, pp, cp, ep, r = layout.tp, layout.pp, layout.cp, layout.ep, layout.replicas
    count = train.global_batch // train.micro_batch
    of_step = count if batch is None else batch // train.micro_batch
    s = (most_micro_batches(of_step, layout) + (pp - 1) / layout.vpp) / count
    return StepTerms(
        compute=s / (tp * pp * cp),
        tensor=s * (tp - 1) / tp / (pp * cp),
        data=(r - 1) / r / (tp * pp * count),
        fixed=1.0,
        context=s * (cp - 1) / cp / (tp * pp),
        experts=s * (ep - 1) / ep / (tp * pp * cp),
    )


def expected_order(layout: Layout, train: TrainSection) -> tuple[float, int, int, int, int]:
    """Sorts layouts of equally many workers, the one expected to be fastest first.

    Least communication comes first: data parallelism, then pipelines while the bubble is small,
    then tensor parallelism.
    """
    cost = step_terms(layout, train).cost(PRIOR)
    return (cost, -layout.dp, layout.pp, layout.tp, layout.ep)


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
    """Judges layouts for one run and one model, of the axes tp, pp, dp and, where the model has
    experts, ep; cp and vpp stand in tables of layouts alone.

    check_layout: raises ConfigError for a layout that the model cannot have, whatever its dp.
    """

    config: RunConfig
    model: ModelSpec
    check_layout: Callable[[Layout], None]

    def fault(self, layout: Layout) -> str:
        """Why the run cannot take a layout; empty when it can."""
        return (
            batch_fault(self.config.train, layout)
            or self._fault_of_any_dp(layout)
            or self._budget.layout_fault(layout)
            or self._budget.change_fault([layout])
        )

    @cached_property
    def _budget(self) -> Budget:
        return Budget(self.config, self.model)

    def _fault_of_any_dp(self, layout: Layout) -> str:
        node = workers_of_a_node(self.config)
        if node is not None and layout.tp > node:
            return f"tp={layout.tp} is more than the {node} workers of a node"
        if layout.tp > 1 and all(tensor.tp_dim is None for tensor in self.model.tensors):
            return "no tensor of the model is split over tp"
        try:
            self.check_layout(layout)
        except ConfigError as error:
            return str(error)
        return ""

    def table(self) -> dict[int, list[Layout]]:
        """Layouts that the run can take by worker count, those expected fastest first.

        Of each count the `KEPT` fastest; not all counts, see `WORTH`; and what notices ask for.
        Each can share every batch of a ramp-up; how fast it is, the whole global batch says.
        """
        train, found = self.config.train, dict[int, list[Layout]]()
        wanted = self._wanted()
        for layout in self._fitting(wanted):
            found.setdefault(layout.workers, []).append(layout)
        for count, entries in found.items():
            order = sorted(entries, key=lambda one: expected_order(one, train))
            found[count] = [*order[:KEPT], *(one for one in order[KEPT:] if one in wanted)]
        return self._thinned(found, {layout.workers for layout in wanted})

    def _wanted(self) -> set[Layout]:
        """The layouts that notices name."""
        return {each.layout.layout() for each in self.config.notices if each.layout is not None}

    def _thinned(
        self, table: dict[int, list[Layout]], wanted: Collection[int]
    ) -> dict[int, list[Layout]]:
        """The table without numbers of workers with which a run does no better than with fewer."""
        asked = {each.workers for each in self.config.notices}
        asked |= {self.config.workers.initial, self.config.workers.max, *wanted}
        node = workers_of_a_node(self.config)
        kept, least = {}, math.inf
        for count, entries in sorted(table.items()):
            cost = step_terms(entries[0], self.config.train).cost(PRIOR)
            whole_nodes = node is not None and count % node == 0
            if count in asked or whole_nodes or cost < least * (1 - WORTH):
                kept[count] = entries
            least = min(least, cost)
        return kept

    def _fitting(self, wanted: Collection[Layout]) -> Iterable[Layout]:
        """All layouts without a fault, and of those `wanted`. Where a worker has no memory for all
        changes among them, those go that do not fit with others: that the run begins with, that
        notices name, that are expected to be faster."""
        train, initial = self.config.train, self.config.workers.initial
        held = dict(self._alone())
        held |= {one: self._budget.loads(one) for one in wanted if not self.fault(one)}
        if self.config.policy.memory_bytes is None:
            return held

        def last(layout: Layout) -> tuple[bool, bool, object]:
            return layout.workers != initial, layout not in wanted, expected_order(layout, train)

        order = sorted(held, key=last)
        if not order:
            return ()
        together = self._budget.together(np.stack([held[layout] for layout in order], axis=1))
        return itertools.compress(order, together)

    def _alone(self) -> Iterator[tuple[Layout, NDArray[np.float64]]]:
        """All layouts without a fault, and what workers hold at most; what has nothing to do
        with dp is asked once for all dp."""
        train, most = self.config.train, self.config.workers.max
        batches = [stretch.batch for stretch in batches_of(train)]
        if any(batch % train.micro_batch for batch in batches):
            return
        for tp, pp, ep in self._shapes():
            least = self._layout(tp, pp, ep, ep)
            if not self._fault_of_any_dp(least):
                fewest = min(batches) // train.micro_batch
                dps = np.arange(ep, min(most // (tp * pp), fewest) + 1, ep)
                for dp, held in zip(dps.tolist(), self._budget.fitting(least, dps).T, strict=True):
                    if held[0] < np.inf:
                        yield replace(least, dp=dp), held

    def _shapes(self) -> Iterator[tuple[int, int, int]]:
        """Every tp that divides a node, and pp and ep that the model's spec knows, for which there
        may be workers."""
        most = self.config.workers.max
        pps = [len(table) for table in self.model.stages.values() if len(table[0]) == 1]
        eps = sorted({1, *(self.model.homes if self._has_experts else ())})
        for tp in _tps(self.config):
            for pp in sorted(pps):
                for ep in eps:
                    if tp * pp * ep <= most:
                        yield tp, pp, ep

    def _layout(self, tp: int, pp: int, dp: int, ep: int) -> Layout:
        """Where a model with experts has tp, Megatron wants sequence parallelism."""
        return Layout(tp, pp, dp, ep=ep, sequence_parallel=self._has_experts and tp > 1)

    @cached_property
    def _has_experts(self) -> bool:
        return any(tensor.expert for tensor in self.model.tensors)

    def why_none(self, workers: int) -> str:
        """Why the best few layouts of `workers` workers cannot be taken."""
        sizes = [size for size in range(1, workers + 1) if workers % size == 0]
        layouts = [
            self._layout(tp, pp, workers // (tp * pp), 1)
            for tp in sizes
            for pp in sizes
            if workers % (tp * pp) == 0
        ]
        train = self.config.train
        some = sorted(layouts, key=lambda each: expected_order(each, train))[:NEAREST]
        return "; ".join(f"{layout}: {self.fault(layout)}" for layout in some)


def _tps(config: RunConfig) -> list[int]:
    """What divides a node, so that no group lies on two."""
    most, node = config.workers.max, workers_of_a_node(config)
    return [tp for tp in range(1, min(node or most, most) + 1) if node is None or node % tp == 0]


def layouts_to_derive(config: RunConfig, layers: int, experts: int) -> list[Layout]:
    """What `layouts: auto` may choose from, with the least dp: what the model's spec is to know.

    Of tp what divides a node, and of pipelines those whose longest stage has fewer layers than with
    one stage less. experts: of a layer that has some, else 0.
    """
    most = config.workers.max
    eps = [size for size in range(1, experts + 1) if experts % size == 0] or [1]
    pps = [
        pp
        for pp in range(1, min(layers, most) + 1)
        if pp == 1 or -(-layers // pp) < -(-layers // (pp - 1))
    ]
    return [
        Layout(tp, pp, ep, ep=ep, sequence_parallel=experts > 0 and tp > 1)
        for tp in _tps(config)
        for pp in pps
        for ep in eps
        if tp * pp * ep <= most
    ]


def resolve_layouts(
    config: RunConfig,
    model: ModelSpec,
    check_layout: Callable[[Layout], None],
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
