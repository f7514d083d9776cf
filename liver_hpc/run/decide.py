"""What the run does next about its shape: one function, `decide`, that changes nothing.

It leaves nodes that are taken away, then grants what was asked for, then grows onto nodes that
came. The target that is estimated here is the one that the handoff uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.agents import Agents
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.requests import GROWTH, ReconfigurationRequest, RequestQueue

MOST_LEAVES = 3
"""Handoffs away from a node that may fail before the state goes to disk instead."""
PATIENT_EXITS = 4.0
"""A window of so many exit deadlines leaves time to wait for agents that are ending."""
COMFORTABLE = 0.5
"""Share of a window that a handoff with joiners may take: they have to boot first."""

Place = Callable[[ModelSpec, RankMap, Layout, Sequence[int]], RankMap]
Situation = tuple[int, frozenset[str], int | None]
"""What a way out depends on: generation, nodes to be left, free slots."""


@dataclass
class NodesAtHand:
    """The nodes, who is on them, and when the run may grow onto them.

    exit_s: how long an agent may take to end. granted_s: when the first of the nodes came that the
    run has not grown onto. grow_at_s: when it may. stuck: the situation in which there was nowhere
    to go from nodes that nobody takes away.
    """

    held: HeldNodes
    agents: Agents
    exit_s: float
    granted_s: float = -math.inf
    grow_at_s: float = math.inf
    stuck: Situation | None = None

    def free_slots(self, ending: bool = True) -> int | None:
        """Slots for more workers; without `ending`, those of agents that are ending count too."""
        return self.held.free_slots(self.agents.taken(ending))

    def situation(self, world: WorldRef) -> Situation:
        return world.generation, self.held.doomed(), self.free_slots()

    def text(self) -> str:
        """All nodes in a line."""
        return self.held.describe(self.agents.taken())


@dataclass
class Estimates:
    """What was learnt of layouts and handoffs, and how workers are placed.

    failed_leaves: handoffs away from nodes that have failed since the last one that was complete.
    """

    policy: LayoutPolicy
    handoffs: HandoffEstimator
    spec: ModelSpec
    place: Place
    failed_leaves: int = field(default=0)


@dataclass(frozen=True)
class Grow:
    """A handoff onto nodes that were granted."""

    request: ReconfigurationRequest
    target: RankMap


@dataclass(frozen=True)
class Grant:
    """The handoff of the request whose turn it is."""

    request: ReconfigurationRequest
    target: RankMap


@dataclass(frozen=True)
class Leave:
    """A handoff away from nodes. action: what is done about them; estimate_s: how long it takes.
    late: the window may be too short."""

    request: ReconfigurationRequest
    target: RankMap
    nodes: tuple[str, ...]
    action: str
    estimate_s: float
    late: bool


@dataclass(frozen=True)
class ToDisk:
    """No handoff gets the workers off these nodes in time: the state goes to disk."""

    nodes: tuple[str, ...]
    reason: str
    action: str
    estimate_s: float


@dataclass(frozen=True)
class Stay:
    """There is nowhere to go from nodes that nobody takes away yet."""

    nodes: tuple[str, ...]
    reason: str
    situation: Situation


@dataclass(frozen=True)
class Drop:
    """There is no point in the request whose turn it is, or no way to place it."""

    request: ReconfigurationRequest
    reason: str


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done now. `reason`: why not, or empty."""

    reason: str = ""


Decision = Grow | Grant | Leave | ToDisk | Stay | Drop | Wait


def decide(
    nodes: NodesAtHand, world: WorldRef, queue: RequestQueue, estimates: Estimates, now_s: float
) -> Decision:
    """What to do next in a run that trains `world` and has no handoff in progress."""
    doomed = nodes.agents.workers_on(nodes.held.doomed(), world.rank_map.workers)
    if doomed:
        way = _leave(nodes, world, doomed, estimates, queue.ceiling, now_s)
        if way is not None:
            return way
    if queue.first is not None:
        return _turn(nodes, world, queue.first, estimates)
    return _grow(nodes, world, estimates, queue.ceiling, now_s)


def placed(
    nodes: NodesAtHand, source: RankMap, request: ReconfigurationRequest, estimates: Estimates
) -> RankMap:
    """Who sits where after a request; joiners have the ids that come next.

    Raises LiverError where it cannot be placed.
    """
    fresh = nodes.agents.next_workers(request.joiners(source))
    if request.replace is not None:
        (joiner,) = fresh
        seats = tuple(joiner if w == request.replace else w for w in source.workers)
        return RankMap(source.layout, seats)
    target, kept = request.target(source), request.kept(source)
    if not fresh:
        on = {worker: nodes.agents.node_of(worker) for worker in kept}
        kept = tuple(nodes.held.stayers(on, target.workers))
    return estimates.place(estimates.spec, source, target, (*sorted(kept), *fresh))


# ---- what was asked for


def _turn(
    nodes: NodesAtHand, world: WorldRef, request: ReconfigurationRequest, estimates: Estimates
) -> Decision:
    pointless = request.pointless(world.rank_map)
    if pointless:
        return Drop(request, pointless)
    free = nodes.free_slots()
    if nodes.agents.ending() and free is not None and free < request.joiners(world.rank_map):
        return Wait(f"{request}: agents that are ending hold slots that it needs")
    try:
        return Grant(request, placed(nodes, world.rank_map, request, estimates))
    except LiverError as error:
        return Drop(request, f"it cannot be placed: {error}")


# ---- growing


def _grow(
    nodes: NodesAtHand, world: WorldRef, estimates: Estimates, ceiling: int, now_s: float
) -> Decision:
    """Onto nodes that were granted, once no more of them come at the moment."""
    layout = _larger(nodes, world.rank_map, estimates, ceiling)
    if now_s < nodes.grow_at_s or layout is None:
        return Wait()
    request = ReconfigurationRequest(GROWTH, nodes.granted_s, layout=layout)
    return Grow(request, placed(nodes, world.rank_map, request, estimates))


def _larger(
    nodes: NodesAtHand, rank_map: RankMap, estimates: Estimates, ceiling: int
) -> Layout | None:
    """A larger layout than the present one for which there is room."""
    room = nodes.held.room({nodes.agents.node_of(worker) for worker in rank_map.workers})
    if room is None:
        return None
    best = estimates.policy.best(min(room, ceiling))
    if best is None or best.workers <= rank_map.layout.workers:
        return None
    free = nodes.free_slots()
    fits = free is None or best.workers - rank_map.layout.workers <= free
    return best if fits else None


# ---- leaving


@dataclass(frozen=True)
class _Way:
    """One way to leave, and how long it takes."""

    request: ReconfigurationRequest
    target: RankMap
    total_s: float


def can_do_without(nodes: NodesAtHand, world: WorldRef, estimates: Estimates, node: str) -> bool:
    """Whether there is a layout for the workers that are left when a node goes."""
    survivors = [w for w in world.rank_map.workers if nodes.agents.node_of(w) != node]
    taken = nodes.agents.taken()
    free = sum(
        (other.slots or 0) - len(taken.get(other.name, ()))
        for other in nodes.held.usable()
        if other.name != node
    )
    return estimates.policy.best(len(survivors) + free) is not None


def _leave(
    nodes: NodesAtHand,
    world: WorldRef,
    doomed: tuple[int, ...],
    estimates: Estimates,
    ceiling: int,
    now_s: float,
) -> Leave | ToDisk | Stay | Wait | None:
    """How workers get off nodes that have to be left; None where they stay for now."""
    occupied = tuple(sorted({nodes.agents.node_of(worker) for worker in doomed}))
    window_s = nodes.held.window_s(occupied, now_s)
    if nodes.agents.ending() and window_s > PATIENT_EXITS * nodes.exit_s:
        return Wait("agents that are ending hold slots that may be needed")
    if math.isinf(window_s) and nodes.stuck == nodes.situation(world):
        return None  # nobody takes the nodes away: the run stays where it is
    text, base = _departure(nodes, doomed, occupied)
    nowhere, way = "there is nowhere else to run", None
    if estimates.failed_leaves >= MOST_LEAVES:
        nowhere = f"{estimates.failed_leaves} handoffs have failed"
        text = f"{text}; {nowhere}"
    else:
        way = _way_out(nodes, world, base, estimates, (ceiling, window_s))
    if way is None and math.isinf(window_s):
        return Stay(occupied, f"{text}: stays: {nowhere}", nodes.situation(world))
    disk_s = estimates.handoffs.checkpoint_s(world.rank_map)
    too_slow = way is not None and estimates.handoffs.measured and way.total_s > window_s
    if way is None or (too_slow and disk_s <= window_s):
        live = "none" if way is None else f"{way.total_s:.1f} s"
        action = f"to disk (live: {live}, disk: {disk_s:.1f} s, window: {window_s:.1f} s)"
        return ToDisk(occupied, f"{text}; {action}", action, disk_s)
    action, late = f"live to {way.target.layout}", way.total_s > window_s
    if late:
        action += f", estimated {way.total_s:.1f} s for a window of {window_s:.1f} s"
    return Leave(way.request, way.target, occupied, action, way.total_s, late)


def _departure(
    nodes: NodesAtHand, doomed: tuple[int, ...], occupied: tuple[str, ...]
) -> tuple[str, ReconfigurationRequest]:
    """What the record says of leaving these nodes, and the request without its layout."""
    held = [nodes.held.get(name) for name in occupied]
    warnings = [known.warning for known in held if known is not None and known.warning is not None]
    reasons = ", ".join(sorted({warning.reason for warning in warnings}))
    deadlines = [w.deadline_s for w in warnings if w.deadline_s is not None]
    text = f"leaving {', '.join(occupied)}: {reasons}"
    made_s = min(warning.at_s for warning in warnings)
    deadline_s = min(deadlines, default=None)
    return text, ReconfigurationRequest(text, made_s, without=doomed, deadline_s=deadline_s)


def _way_out(
    nodes: NodesAtHand,
    world: WorldRef,
    base: ReconfigurationRequest,
    estimates: Estimates,
    bounds: tuple[int, float],
) -> _Way | None:
    """The best layout that can be reached in the window, or else the one reached soonest.

    bounds: the ceiling and the window in seconds.
    """
    ceiling, window_s = bounds
    source = world.rank_map

    def way(layout: Layout) -> _Way:
        request = ReconfigurationRequest(
            base.origin, base.made_s, layout, None, base.without, base.deadline_s
        )
        target = placed(nodes, source, request, estimates)
        joiners = request.joiners(source)
        return _Way(request, target, estimates.handoffs.estimate(source, target, joiners).total_s)

    survivors, free = len(base.kept(source)), nodes.free_slots()
    if free is None or survivors + free >= source.layout.workers:
        most: Layout | None = source.layout  # the same shape, on other nodes
    else:
        most = estimates.policy.best(min(survivors + free, ceiling))
    if most is not None and most.workers > survivors:
        with_joiners = way(most)
        if with_joiners.total_s <= COMFORTABLE * window_s:
            return with_joiners
    smaller = [way(layout) for layout in estimates.policy.choices(survivors)]
    in_time = next((each for each in smaller if each.total_s <= window_s), None)
    if in_time is not None:
        return in_time
    if not smaller and most is not None:
        smaller = [way(most)]
    return min(smaller, key=lambda each: each.total_s, default=None)
