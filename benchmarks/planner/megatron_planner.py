"""Megatron's planner (megatron.core.resharding) on the rank maps of a case, without processes.

Its own code runs: `build_centralized_reshard_plan` as rank 0, which plans for all ranks. Only the
two collectives around it are replaced: the gather returns every rank's metadata, made beforehand,
and the broadcast does nothing. Neither is timed, in its favour. It plans parameters only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.resharding import planner
from megatron.core.resharding.utils import ParameterMetadata

from benchmarks.planner.cases import Case, fresh_model
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape
from liver_hpc.layout.tensors import ModelSpec

if hasattr(planner, "build_local_reshard_plan"):
    raise ImportError(
        "from 0.19 on each rank plans its own part; what is timed here is one for all"
    )

Metadata = list[list[ParameterMetadata]]


class MegatronPlanner:
    """Plans one case again and again; its metadata are made once."""

    def __init__(self, case: Case) -> None:
        model = fresh_model()
        world = 1 + max(*case.source_workers, *case.target_workers)
        self._world = world
        self._source = _metadata(model, case.source, case.source_workers, world)
        self._target = _metadata(model, case.target, case.target_workers, world)

    def plan(self) -> tuple[float, int]:
        """CPU seconds until rank 0 has all plans, and how many transfers they hold."""
        module = SimpleNamespace(
            pg_collection=SimpleNamespace(),
            named_parameters=lambda recurse: (),
            named_modules=lambda: (),
        )
        plans: list[Any] = []
        with self._without_processes(plans):
            began_s = time.process_time()
            planner.build_centralized_reshard_plan(module, module)
            took_s = time.process_time() - began_s
        return took_s, sum(len(plan.recv_ops) for plan in plans)

    @contextlib.contextmanager
    def _without_processes(self, plans: list[Any]) -> Iterator[None]:
        gathered = iter([self._source, self._target])

        def gather(into: list[Any], mine: Any) -> None:
            into[:] = next(gathered)

        def broadcast(objects: list[Any], src: int) -> None:
            plans.extend(objects)

        replaced = {
            "get_rank": lambda: 0,
            "get_world_size": lambda: self._world,
            "all_gather_object": gather,
            "broadcast_object_list": broadcast,
        }
        kept = {name: getattr(torch.distributed, name) for name in replaced}
        for name, stand_in in replaced.items():
            setattr(torch.distributed, name, stand_in)
        try:
            yield
        finally:
            for name, original in kept.items():
                setattr(torch.distributed, name, original)


def _metadata(model: ModelSpec, layout: Layout, workers: tuple[int, ...], world: int) -> Metadata:
    """What each rank would tell the others of its parameters."""
    everything: Metadata = [[] for _ in range(world)]
    for at in layout.coordinates():
        rank = workers[layout.rank(at)]
        everything[rank] = _of_rank(model, layout, workers, at)
    return everything


def _of_rank(
    model: ModelSpec, layout: Layout, workers: tuple[int, ...], at: Coordinate
) -> list[ParameterMetadata]:
    def along(axis: str, size: int) -> list[int]:
        seats = (at._replace(**{axis: number}) for number in range(size))
        return [workers[layout.rank(seat)] for seat in seats]

    tp_ranks, dp_ranks, pp_ranks = (
        along("tp", layout.tp),
        along("replica", layout.replicas),
        along("pp", layout.pp),
    )
    found = []
    for index in model.held_tensors(layout, at):
        tensor = model.tensors[index]
        rows, cols = local_shape(tensor, layout.tp)
        split = tensor.tp_dim is not None
        found.append(
            ParameterMetadata(
                name=tensor.name,
                shape=(rows, cols)[: len(tensor.shape)],
                dtype=torch.bfloat16,
                element_size=2,
                is_tp=split,
                partition_dim=tensor.tp_dim or 0,
                partition_stride=len(tensor.tp_blocks) or 1,
                owner_rank=workers[layout.rank(at)],
                tensor_parallel_group_ranks=tp_ranks if split else None,
                data_parallel_group_ranks=dp_ranks,
                pipeline_parallel_group_ranks=pp_ranks,
                resolved_name=tensor.name,
            )
        )
    return found
