"""Our planner on one case: CPU seconds, and memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import dataclass

from benchmarks.planner.cases import Case, fresh_model
from liver_hpc.layout import ownership
from liver_hpc.layout.plan import Handoff, transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec


@dataclass(frozen=True)
class Planned:
    """One plan: how long it took, and its moves by direction."""

    took_s: float
    sends: int
    receives: int
    local: int


def plan_once(case: Case, worker: int) -> Planned:
    """CPU seconds from the rank maps, as lists of worker ids, to the worker's plan.

    As on a worker that plans its first handoff: nothing is remembered of an earlier plan.
    """
    model = _forgotten()
    began_s = time.process_time()
    source, target = case.rank_maps()
    plan = transfer_plan(model, source, target, worker)
    took_s = time.process_time() - began_s
    return Planned(took_s, len(plan.sends), len(plan.receives), len(plan.local))


def plan_parameters(case: Case, worker: int) -> float:
    """The same for the parameters alone, which is all that Megatron's planner plans."""
    model = _forgotten()
    began_s = time.process_time()
    source, target = case.rank_maps()
    handoff = Handoff(model, source, target)
    moves = []
    to, at = target.coordinate_of(worker), source.coordinate_of(worker)
    if to is not None:
        for index in model.held_tensors(target.layout, to):
            moves += handoff.incoming(PARAMETER, index, to)
    if at is not None:
        for index in model.held_tensors(source.layout, at):
            moves += handoff.outgoing(PARAMETER, index, at)
    moves.sort()
    return time.process_time() - began_s


def peak_bytes(case: Case, worker: int) -> int:
    """The most that Python held at once for one plan, rank maps and memoized boxes included."""
    model = _forgotten()
    tracemalloc.start()
    try:
        source, target = case.rank_maps()
        transfer_plan(model, source, target, worker)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _forgotten() -> ModelSpec:
    """A model of which nothing is memoized."""
    for function in (
        ownership.slabs,
        ownership.stage_shards,
        ownership.optimizer_boxes,
    ):
        function.cache_clear()
    gc.collect()
    return fresh_model()
