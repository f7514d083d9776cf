"""Which node straggles: its workers' forward passes take longer than those of others that do the
same.

What is compared are workers of one pipeline stage in a world; they compute the same on other
samples. A worker's ratio is the mean time of its passes over the median of its peers', those of its
stage on other nodes: within a node nothing could be drained. Members of a tensor-, context- or
expert-parallel group wait for each other inside their passes; where such a group spans nodes nobody
can tell which of them is slow, and its workers are not compared.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from liver_hpc.config.schema import StragglersSection
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import ForwardTimes
from liver_hpc.run.events import NodeKeepsUp, NodeStraggles

log = logging.getLogger(__name__)

LEAST_STEPS = 5
"""A node is named after so many steps at least, however long they take."""


@dataclass(frozen=True)
class Pace:
    """A node's ratio is that of its slowest worker, `worker`: a step takes as long as the slowest
    one wherever it is, and one slow GPU is reason enough to leave a node. A median over the node
    would hide it behind seven quick ones."""

    ratio: float
    worker: int


def paces(
    rank_map: RankMap, pass_s: Mapping[int, float], node_of: Callable[[int], str]
) -> dict[str, Pace]:
    """How each node keeps up that can be compared with others. pass_s: the mean time of a forward
    pass, of every worker. A worker whose node has no name belongs to no node."""
    stages = _comparable(rank_map, pass_s, node_of)
    found: dict[str, Pace] = {}
    for stage in map(sorted, stages.values()):
        times_s = [seconds for seconds, *_ in stage]
        places: dict[str, list[int]] = defaultdict(list)
        for place, (*_, node) in enumerate(stage):
            places[node].append(place)
        for node, own in places.items():
            others_s = _median_of_others(times_s, own)
            slowest_s, worker, _ = stage[own[-1]]
            if others_s and (node not in found or slowest_s / others_s > found[node].ratio):
                found[node] = Pace(slowest_s / others_s, worker)
    return found


def _comparable(
    rank_map: RankMap, pass_s: Mapping[int, float], node_of: Callable[[int], str]
) -> dict[int, list[tuple[float, int, str]]]:
    """By stage, each worker that waits for nobody on another node in its passes: their mean time,
    the worker, its node."""
    together = math.lcm(rank_map.layout.cp, rank_map.layout.ep)  # replicas
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for worker, at in zip(rank_map.workers, rank_map.layout.coordinates(), strict=True):
        groups[at.pp, at.replica // together].append(worker)
    stages: dict[int, list[tuple[float, int, str]]] = defaultdict(list)
    for (stage, _), members in groups.items():
        node, *others = {node_of(worker) for worker in members}
        if node and not others:
            stages[stage] += [(pass_s[worker], worker, node) for worker in members]
    return stages


def _median_of_others(ascending: Sequence[float], own: Sequence[int]) -> float:
    """The median of what is at other places than `own`, which ascend, too; 0 where there is
    nothing."""
    others = len(ascending) - len(own)
    if not others:
        return 0.0
    # Of the places before `own[k]` k are own ones.
    before = [place - number for number, place in enumerate(own)]

    def at(rank: int) -> float:
        return ascending[rank + bisect_right(before, rank)]

    return (at((others - 1) // 2) + at(others // 2)) / 2


@dataclass
class _Streak:
    """seconds: for how long a node has straggled. weighted: its ratios, each times its seconds."""

    since_step: int
    seconds: float = 0.0
    weighted: float = 0.0

    def add(self, ratio: float, seconds: float) -> None:
        self.seconds += seconds
        self.weighted += ratio * seconds

    @property
    def ratio(self) -> float:
        return self.weighted / self.seconds


class StragglerWatch:
    """What workers tell of their forward passes, and which node straggles by it.

    Nodes are judged window by window; one ends once all workers of the world have told of further
    passes. A node straggles while its ratio is at least `factor` in every one, and is named after
    `for_s` of them. While a handoff is under way time stands still; another world begins anew, and
    so does a coordinator that takes over: what was told to the one before is in no journal. Which
    nodes are named it finds in the journal.
    """

    def __init__(self, section: StragglersSection | None, node_of: Callable[[int], str]) -> None:
        self._section = section
        self._is_asked_for = section != StragglersSection()
        self._node_of = node_of
        self._generation = -1
        self._since: dict[int, ForwardTimes] = {}  # at the start of the window
        self._told: dict[int, ForwardTimes] = {}  # of passes since
        self._begun_s: float | None = None  # when the window began; None while there is none
        self._streaks: dict[str, _Streak] = {}
        self._well_s: dict[str, float] = {}  # for how long a node has kept up that was named

    def heard(self, worker: int, forward: ForwardTimes) -> None:
        """Of a worker."""
        if self._section is None or forward.generation != self._generation:
            return
        since = self._since.setdefault(worker, forward)
        if forward.passes > since.passes:
            self._told[worker] = forward

    def look(
        self, world: WorldRef | None, named: Collection[str], step: int, now_s: float
    ) -> list[NodeStraggles | NodeKeepsUp]:
        """What can be told now, after `step` steps; to be called again and again. world: whose
        workers can be compared now; None while a handoff is under way, say. named: nodes that are
        known to straggle."""
        if self._section is None:
            return []
        if world is None:
            self._begun_s = None
            return []
        if self._begun_s is None or world.generation != self._generation:
            self._begin(world.generation, now_s)
            return []
        if len(self._told) < len(world.rank_map.workers):
            return []
        pass_s = {worker: _mean_s(self._since[worker], told) for worker, told in self._told.items()}
        found = paces(world.rank_map, pass_s, self._node_of)
        if not found and self._is_asked_for:
            self._is_asked_for = False  # the log says so once
            log.info("policy.stragglers: no nodes can be compared, none is named")
        took_s, self._begun_s = now_s - self._begun_s, now_s
        self._since, self._told = self._told, {}
        return self._judged(found, named, step, took_s)

    def _begin(self, generation: int, now_s: float) -> None:
        """A window in which what was told before does not count."""
        self._since, self._told, self._begun_s = {}, {}, now_s
        if generation != self._generation:
            self._streaks, self._well_s, self._generation = {}, {}, generation

    def _judged(
        self, found: Mapping[str, Pace], named: Collection[str], step: int, took_s: float
    ) -> list[NodeStraggles | NodeKeepsUp]:
        assert self._section is not None
        slow = {n: pace for n, pace in found.items() if pace.ratio >= self._section.factor}
        events: list[NodeStraggles | NodeKeepsUp] = []
        events += self._keep_up((found.keys() - slow.keys()) & {*named}, took_s)
        if 2 * len(slow) > len(found):
            slow = {}  # the others are no measure of what is usual
        self._streaks = {n: each for n, each in self._streaks.items() if n in slow}
        for node, pace in slow.items():
            self._streaks.setdefault(node, _Streak(step)).add(pace.ratio, took_s)
        due = [
            (streak.ratio, node)
            for node, streak in self._streaks.items()
            if streak.seconds >= self._section.for_s
            and step - streak.since_step >= LEAST_STEPS
            and node not in named
        ]
        if due:
            ratio, node = max(due)
            for_s = self._streaks[node].seconds
            events.append(NodeStraggles(node, ratio, for_s, found[node].worker, len(found)))
        return events

    def _keep_up(self, well: Collection[str], took_s: float) -> list[NodeKeepsUp]:
        """Of nodes that were named and keep up now: those that have done so for long enough."""
        assert self._section is not None
        well_s = {node: self._well_s.get(node, 0.0) + took_s for node in sorted(well)}
        long_s = {node: for_s for node, for_s in well_s.items() if for_s >= self._section.for_s}
        self._well_s = {node: well_s[node] for node in well_s.keys() - long_s.keys()}
        return [NodeKeepsUp(node, for_s) for node, for_s in long_s.items()]


def _mean_s(since: ForwardTimes, told: ForwardTimes) -> float:
    """Of the passes between."""
    return (told.seconds - since.seconds) / (told.passes - since.passes)
