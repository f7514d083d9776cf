"""Large worlds: which layout the policy picks, who sits where, and what the handoff then costs."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from benchmarks.goodput.trace import DAY_S
from benchmarks.models import layout_table
from benchmarks.planner.cases import nodes_of
from benchmarks.simulate.play import Change, ControlLink, Outcome, play
from benchmarks.simulate.timings import Timings, Work
from benchmarks.simulate.traffic import sampled_traffic
from liver_hpc.config.schema import DeadlineSection, RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.tensors import ModelSpec


@dataclass(frozen=True)
class Machine:
    """The cluster and the training on it. worker_flops: what a worker really reaches.

    sampled_workers: how many of a handoff's workers are planned; the busiest of them counts.
    """

    timings: Timings
    control: ControlLink
    deadlines: DeadlineSection
    worker_flops: float
    batch_tokens: int
    global_batch: int
    sampled_workers: int = 12


@dataclass(frozen=True)
class Simulated:
    """One handoff of a large world. place_s: CPU of placement, inside the event loop."""

    source: Layout
    target: Layout
    step_s: float
    place_s: float
    moved_bytes: int
    outcome: Outcome

    @property
    def lost_s(self) -> float:
        """From the end of the source's last step to the end of the target's first, less a step."""
        took_s = self.outcome.first_step_ended_s - self.outcome.last_step_ended_s
        return took_s - self.step_s

    def goodput(self, events_a_day: float, slowdown_s: float) -> float:
        """The share of a day that is not lost to so many such handoffs."""
        return 1.0 - events_a_day * (self.lost_s + slowdown_s) / DAY_S


def simulate(model: ModelSpec, machine: Machine, source: Layout, workers: int) -> Simulated:
    """A world of layout `source` becomes one of at most `workers` workers.

    The policy chooses among the layouts with the source's pp and its tp or half of it. Raises
    LiverError when the handoff does not complete, with what the machine said.
    """
    policy = LayoutPolicy(_table(source, workers, machine), model)
    step_s = _step_s(model, machine, source.workers)
    policy.observe(source, step_s)
    target = next(layout for layout in policy.choices(workers) if layout != source)
    nodes = nodes_of(range(max(workers, source.workers)))
    people = first_rank_map(source, range(source.workers), nodes)
    began_s = time.process_time()
    seated = place(model, people, target, range(workers), nodes)
    place_s = time.process_time() - began_s
    work = Work(
        joiners=len({*seated.workers} - {*people.workers}),
        traffic=sampled_traffic(model, people, seated, machine.sampled_workers),
        source_step_s=step_s,
        target_step_s=policy.expected_step_s(target),
    )
    change = Change(model, people, seated, work, machine.timings)
    outcome = play(change, _deadlines(machine.deadlines, step_s), machine.control)
    if not outcome.completed:
        raise LiverError(f"{source} > {target}: {outcome.detail}")
    moved_bytes = work.traffic.moved_bytes
    return Simulated(source, target, work.target_step_s, place_s, moved_bytes, outcome)


def _step_s(model: ModelSpec, machine: Machine, workers: int) -> float:
    """Six operations a parameter and token."""
    parameters = sum(tensor.elements for tensor in model.tensors)
    return 6.0 * parameters * machine.batch_tokens / (workers * machine.worker_flops)


def _deadlines(least: DeadlineSection, step_s: float) -> DeadlineSection:
    """Those that a step falls into leave room for several: the run file of such a model would."""
    room_s = 4 * step_s
    return least.model_copy(
        update={
            "boundary_s": max(least.boundary_s, room_s),
            "transfer_s": max(least.transfer_s, room_s),
        }
    )


def _table(source: Layout, workers: int, machine: Machine) -> RunConfig:
    """A run file that allows the source's layout and those that the policy chooses from."""
    tps, counts = sorted({source.tp, max(1, source.tp // 2)}), (source.workers, workers)
    layouts = layout_table(
        Layout(tp, source.pp, dp)
        for tp, count in itertools.product(tps, counts)
        if (dp := count // (tp * source.pp))
    )
    most = max(*layouts, workers, source.workers)
    return RunConfig.model_validate(
        {
            "train": {"steps": 1, "global_batch": machine.global_batch},
            "workers": {"initial": source.workers, "max": most},
            "layouts": layouts,
            "policy": {"layout": "auto"},
        }
    )
