"""A worker's side: worlds of several batches, of which it times one step after the other."""

from __future__ import annotations

import copy
import importlib
import time
from typing import Any

import torch

from benchmarks.transitions import seat
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.world.steps import Flags

dist: Any = importlib.import_module("torch.distributed")  # its stubs know few of its names


class TimedSeat(seat.Seat):
    """One worker of a benchmark that times steps."""

    def build_batched(
        self, name: str, rank_map: RankMap, generation: int, global_batch: int
    ) -> None:
        """A world of the model that trains with another global batch, from the run's seed.
        Collective over the rank map."""
        recipe = copy.copy(self._used)
        train = recipe.config.train.model_copy(update={"global_batch": global_batch})
        recipe.config = recipe.config.model_copy(update={"train": train})
        self._recipe = recipe
        self.build(name, rank_map, generation, None)
        self.start(name)

    def timed(self, name: str, step: int) -> float | None:
        """Seconds that a step takes of a world whose workers begin at once. Collective over it;
        None on a worker without a seat."""
        world = self._places[name].world
        if world is None:
            return None
        dist.all_reduce(torch.zeros(1), group=world.groups.intra_dist_opt)
        began_s = time.perf_counter()
        world.agree(world.forward_backward(step), world.update(step), Flags())
        return time.perf_counter() - began_s
