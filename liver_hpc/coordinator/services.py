"""The outside world of the coordinator, each part replaceable by its in-memory twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from liver_hpc.clock import Clock
from liver_hpc.cluster.launcher import Launcher
from liver_hpc.cluster.pool import FixedPool, NodePool
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe
from liver_hpc.rendezvous.base import Rendezvous
from liver_hpc.run.recorder import Metrics

Placement = Callable[[ModelSpec, RankMap, Layout, Sequence[int]], RankMap]


@dataclass(frozen=True)
class Services:
    """What a coordinator works with. It closes all but clock and recipe at its end."""

    clock: Clock
    recipe: Recipe
    launcher: Launcher
    rendezvous: Rendezvous
    metrics: Metrics
    pool: NodePool = field(default_factory=FixedPool)
    place: Placement = place
