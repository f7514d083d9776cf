"""One of the refit's processes: two worlds beside each other, dp2 and tp2, and both ways to carry
parameters from one to the other."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import order_of
from benchmarks.peers.training import LIMIT, open_worker
from benchmarks.steady_state.plain import filled_module
from benchmarks.stream.process import BoxState
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import HandoffSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Move, TransferPlan
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire

# Any: torch's stubs do not export what is public.
dist: Any = importlib.import_module("torch.distributed")


class Refit:
    """One of the two processes."""

    def __init__(self, directory: Path, rank: int, workers: int) -> None:
        open_worker()
        torch.set_num_threads(1)
        store = dist.FileStore(str(directory / "store"), workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=LIMIT)
        self._recipe = load_run_recipe(load_run(directory / "run.yaml"), directory)

    def measure(
        self, changes: Sequence[tuple[Layout, Layout]], repeats: int
    ) -> list[dict[str, Any]]:
        """Of each change of layout, both ways. Collective."""
        return [_measure(self._recipe, *layouts, repeats) for layouts in changes]


def _measure(recipe: Recipe, source: Layout, target: Layout, repeats: int) -> dict[str, Any]:
    from megatron.core.resharding.refit import swap_model_weights

    old, new = _world(recipe, source), _world(recipe, target)
    wanted = [parameter.detach().clone() for parameter in new.parameters()]
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    ours = _Ours(recipe, source, target)
    ways: dict[str, Callable[[], None]] = {
        "refit": lambda: swap_model_weights(old, new, "gloo"),
        "ours": ours.stream,
    }
    took_s: dict[str, list[float]] = {way: [] for way in ways}
    for way in order_of(list(ways), repeats + 1):
        dist.barrier()
        began_s = time.monotonic()
        ways[way]()
        dist.barrier()
        took_s[way].append(time.monotonic() - began_s)
    wrong = sorted(
        {
            name.rpartition("layers.")[2].partition(".")[2] or name
            for (name, parameter), value in zip(new.named_parameters(), wanted, strict=True)
            if not torch.equal(parameter, value)
        }
    )
    arrived = torch.tensor(int(ours.whole()))
    dist.all_reduce(arrived, dist.ReduceOp.MIN)
    return {
        "layouts": f"{_text(source)} -> {_text(target)}",
        "refit_wrong": ", ".join(wrong),
        "ours_wrong": "" if arrived else "parameters",
        **{f"{way}_first_s": seconds[0] for way, seconds in took_s.items()},
        **{f"{way}_s": statistics.median(seconds[1:]) for way, seconds in took_s.items()},
    }


def _text(layout: Layout) -> str:
    return f"tp{layout.tp}" if layout.tp > 1 else f"dp{layout.dp}"


def _world(recipe: Recipe, layout: Layout) -> Any:
    """A module with the run's first values, which do not depend on the layout."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.config.train.seed)
    module, _ = filled_module(recipe, layout)
    for name, parameter in module.named_parameters():
        if "linear_fc1" in name and module.config.gated_linear_unit:
            # What refit asks of whoever builds a gated layer; 0.16 leaves it 1 and mixes halves.
            parameter.partition_stride = 2
    return module


class _Ours:
    """Our plan and transport for the parameters of the same change."""

    def __init__(self, recipe: Recipe, source: Layout, target: Layout) -> None:
        spec, handoff = recipe.spec, HandoffSection()
        members = tuple(range(source.workers))
        old, new = RankMap(source, members), RankMap(target, members)
        rank = dist.get_rank()
        self._source = BoxState(spec, old, rank, 2.5, torch.device("cpu"))
        self._target = BoxState(spec, new, rank, -1.0, torch.device("cpu"))
        wire = group_wire(dist.group.WORLD, {m: m for m in members}, torch.device("cpu"))
        self._transport = Transport(wire, spec, handoff)
        self._prepared = self._transport.prepare(
            _parameters_of(transfer_plan(spec, old, new, rank))
        )

    def stream(self) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT.total_seconds(), "the transfer")
        self._transport.stream(
            self._prepared, self._source, self._target, lambda _bytes: None, deadline
        )

    def whole(self) -> bool:
        """Whether every parameter has arrived."""
        return self._target.filled_with(2.5, PARAMETER)


def _parameters_of(plan: TransferPlan) -> TransferPlan:
    """The moves of parameters alone, as a handoff makes them before the target's first step."""

    def of(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.kind == PARAMETER)

    return TransferPlan(plan.worker, of(plan.sends), of(plan.receives), of(plan.local))
