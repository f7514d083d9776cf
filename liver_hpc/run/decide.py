"""What the run does next about its shape: `Decider.decide` says it, and changes nothing.

It leaves nodes that are taken away, then grants what was asked for, then grows onto nodes that
came. The target that is estimated here is the one that the handoff uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap, alone
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.layout.snapshots import partners
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.agents import STANDBY
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.requests import GROWTH, IN_PLACE, ReconfigurationRequest, RequestQueue

MOST_LEAVES = 3
"""Handoffs away from a node that may fail before the state goes to disk instead."""
PATIENT_EXITS = 4.0
"""A window of so many exit deadlines leaves time to wait for agents that are ending."""
COMFORTABLE = 0.5
"""Share of a window that a handoff with joiners may take: they have to boot first."""
MOST_PLACED, MOST_ALIKE = 8, 4
"""So many of the best layouts are placed where none may be reached in time, and so many in which
nothing but dp differs."""

Place = Callable[[ModelSpec, RankMap, Layout, Sequence[int], Mapping[int, int]], RankMap]


@dataclass
class Estimates:
    """What was learnt of layouts and handoffs, and how workers are placed.

    failed_leaves: handoffs away from nodes that have failed since the last one that was complete,
    but for those in which a worker that trained or a coordinator was lost.
    """

    policy: LayoutPolicy
    handoffs: HandoffEstimator
    spec: ModelSpec
    place: Place
    failed_leaves: int = 0


@dataclass(frozen=True)
class Begin:
    """A handoff, for what was asked for or called for by nodes that came.

    One away from `nodes` has also: what is done about them, how many seconds that takes by
    estimate, and whether their window may be too short.
    """

    request: ReconfigurationRequest
    target: RankMap
    nodes: tuple[str, ...] = ()
    action: str = ""
    estimate_s: float = 0.0
    late: bool = False


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
    action: str


@dataclass(frozen=True)
class Drop:
    """There is no point in the request whose turn it is, or no way to place it."""

    request: ReconfigurationRequest
    reason: str


@dataclass(frozen=True)
class Decline:
    """A change that nothing forces would not repay what it costs. for_good: nor later, as the run
    is to end."""

    layout: Layout
    reason: str
    for_good: bool = False


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done now. `reason`: why not, or empty."""

    reason: str = ""


Decision = Begin | ToDisk | Stay | Drop | Decline | Wait


@dataclass(frozen=True)
class Decider:
    """A run that trains `world` and has no handoff in progress, as it stands at `now_s`.

    steps_left: until what is known to come: the next change that the run file asks for, or the end
    of the run. horizon_s: the longest that a layout is expected to last. catching_up: steps that a
    loss took are done again first, before anybody joins unasked. redone_steps: how many there would
    be if a worker were lost now; infinite where no snapshot of the world stands.
    """

    nodes: HeldNodes
    world: WorldRef
    queue: RequestQueue
    estimates: Estimates
    now_s: float
    steps_left: float = math.inf
    horizon_s: float = math.inf
    catching_up: bool = False
    redone_steps: float = math.inf

    @property
    def source(self) -> RankMap:
        return self.world.rank_map

    def decide(self) -> Decision:
        """What to do next."""
        doomed = self.nodes.agents.workers_on(self.nodes.doomed(), self.source.workers)
        if doomed:
            way = self._leave(doomed)
            if isinstance(way, ToDisk):
                way = self._leave_first(doomed) or way
            if way is not None:
                return way
        if self.queue.first is not None:
            return self._turn(self.queue.first)
        if self.queue.awaits is not None and self._has_room(self.queue.awaits):
            return self._turn(self.queue.awaits)
        return self._grow()

    def _placed(self, request: ReconfigurationRequest) -> RankMap:
        """Who sits where after a request; joiners that are to be launched have the next ids.

        Raises LiverError where it cannot be placed.
        """
        nodes, source = self.nodes, self.source
        joiners = nodes.joiners(request.joiners(source))
        on = nodes.nodes_of(source.workers, joiners)
        if request.replace is not None:
            (joiner,) = joiners
            seats = tuple(joiner if w == request.replace else w for w in source.workers)
            return RankMap(source.layout, seats, tuple(on.get(w, alone(w)) for w in seats))
        target, kept = request.layout or source.layout, request.kept(source)
        if not joiners:
            kept = tuple(nodes.stayers(kept, target.workers))
        available = (*sorted(kept), *joiners)
        return self.estimates.place(self.estimates.spec, source, target, available, on)

    def _to_boot(self, request: ReconfigurationRequest) -> int:
        """How many workers have to be launched for a request."""
        return max(0, request.joiners(self.source) - len(self.nodes.kept()))

    # ---- what was asked for

    def _has_room(self, request: ReconfigurationRequest) -> bool:
        free = self.nodes.free_slots()
        return free is None or free >= request.joiners(self.source)

    def _turn(self, request: ReconfigurationRequest) -> Decision:
        pointless = request.pointless(self.source)
        if pointless:
            return Drop(request, pointless)
        agents = self.nodes.agents
        if (agents.ending() or agents.booting(STANDBY)) and not self._has_room(request):
            return Wait(f"{request}: agents that are ending or booting hold slots that it needs")
        try:
            return Begin(request, self._placed(request))
        except LiverError as error:
            return Drop(request, f"it cannot be placed: {error}")

    # ---- growing

    def _grow(self) -> Decision:
        """Onto nodes that were granted, once no more of them come at the moment; or back to what
        the run was before it lost workers, whatever that costs."""
        layout = self._larger()
        if self.catching_up or self.now_s < self.nodes.grow_at_s or layout is None:
            return Wait()
        origin = IN_PLACE if self.queue.missing is not None else GROWTH
        request = ReconfigurationRequest(origin, self.nodes.granted_s, layout=layout)
        target = self._placed(request)
        if origin == IN_PLACE:
            return Begin(request, target)
        return self._not_worth(target, self._to_boot(request)) or Begin(request, target)

    def _not_worth(self, target: RankMap, to_boot: int) -> Decline | None:
        """To stay as it is, where nothing forces the run to another layout."""
        source, policy, handoffs = self.source, self.estimates.policy, self.estimates.handoffs
        price = handoffs.price(source, target, to_boot)
        known_s = self.steps_left * handoffs.usual_step_s() - price.ready_s
        lasting_s = max(0.0, min(self.horizon_s, known_s))
        reason = policy.not_worth(source.layout, target.layout, price.cost_s, lasting_s)
        if not reason:
            return None
        for_good = known_s <= self.horizon_s and not self.queue.notices_left
        return Decline(target.layout, reason, for_good)

    def _larger(self) -> Layout | None:
        """A larger layout than the present one for which there is room."""
        nodes, workers = self.nodes, self.source.workers
        room = nodes.room({nodes.agents.node_of(worker) for worker in workers})
        if room is None:
            missing = self.queue.missing
            return missing if missing is not None and missing.workers > len(workers) else None
        best = self.estimates.policy.best(min(room, self.queue.ceiling))
        if best is None or best.workers <= len(workers):
            return None
        free = nodes.free_slots()
        return best if free is None or best.workers - len(workers) <= free else None

    # ---- leaving

    def _leave(self, doomed: tuple[int, ...]) -> Decision | None:
        """How workers get off nodes that have to be left; None where they stay for now."""
        nodes, estimates = self.nodes, self.estimates
        occupied = tuple(sorted({nodes.agents.node_of(worker) for worker in doomed}))
        window_s = nodes.window_s(occupied, self.now_s)
        ending = nodes.agents.ending(lingering=False)
        if ending and window_s > PATIENT_EXITS * nodes.agents.exit_s:
            return Wait("agents that are ending hold slots that may be needed")
        if math.isinf(window_s) and nodes.stuck == nodes.situation(self.world):
            return None  # nobody takes the nodes away: the run stays where it is
        base = self._departure(doomed, occupied)
        text, nowhere, way = base.origin, "there is nowhere else to run", None
        if estimates.failed_leaves >= MOST_LEAVES:
            nowhere = f"{estimates.failed_leaves} handoffs have failed"
            text = f"{text}; {nowhere}"
        else:
            way = self._way_out(base, window_s)
        if way is None and math.isinf(window_s):
            return Stay(occupied, f"{text}: stays: {nowhere}", f"stays: {nowhere}")
        disk_s = estimates.handoffs.checkpoint_s(self.source)
        too_slow = way is not None and estimates.handoffs.measured and way.estimate_s > window_s
        if way is None or (too_slow and disk_s <= window_s and not self._can_lose(doomed)):
            live = "none" if way is None else f"{way.estimate_s:.1f} s"
            action = f"to disk (live: {live}, disk: {disk_s:.1f} s, window: {window_s:.1f} s)"
            return ToDisk(occupied, f"{text}; {action}", action, disk_s)
        action, late = f"live to {way.target.layout}", way.estimate_s > window_s
        if late:
            action += f", estimated {way.estimate_s:.1f} s for a window of {window_s:.1f} s"
        return replace(way, nodes=occupied, action=action, late=late)

    def _leave_first(self, doomed: tuple[int, ...]) -> Begin | None:
        """How workers get off those of these nodes that are taken at a known time, onto the others
        too; None where they do not."""
        nodes = self.nodes
        hurried = tuple(w for w in doomed if nodes[nodes.agents.node_of(w)].deadline_s is not None)
        way = self._leave(hurried) if hurried != doomed else None
        return way if isinstance(way, Begin) else None

    def _can_lose(self, doomed: tuple[int, ...]) -> bool:
        """Whether the run goes on from memory where these workers are lost on their way out, and
        sooner than from disk."""
        source, handoffs = self.source, self.estimates.handoffs
        others = [worker for worker in source.workers if worker not in doomed]
        held = dict(zip(source.workers, partners(source), strict=True))
        return (
            self.redone_steps * handoffs.usual_step_s() <= handoffs.restart_s(source)
            and all(held[worker] in others for worker in doomed)
            and self.estimates.policy.best(len(others)) is not None
        )

    def _departure(
        self, doomed: tuple[int, ...], occupied: tuple[str, ...]
    ) -> ReconfigurationRequest:
        """The request to leave these nodes, without its layout."""
        held = [self.nodes[name] for name in occupied]
        warnings = [node.warning for node in held if node.warning is not None]
        reasons = ", ".join(sorted({warning.reason for warning in warnings}))
        deadlines = [w.deadline_s for w in warnings if w.deadline_s is not None]
        return ReconfigurationRequest(
            f"leaving {', '.join(occupied)}: {reasons}",
            min(warning.at_s for warning in warnings),
            without=doomed,
            deadline_s=min(deadlines, default=None),
        )

    def _way_out(self, base: ReconfigurationRequest, window_s: float) -> Begin | None:
        """The best layout that can be reached in the window, or else the one reached soonest; of
        the best few, and of those in which workers keep their shares of the parameters."""
        source, policy = self.source, self.estimates.policy

        def way(layout: Layout) -> Begin:
            request = replace(base, layout=layout)
            target, to_boot = self._placed(request), self._to_boot(request)
            estimate_s = self.estimates.handoffs.estimate_s(source, target, to_boot)
            return Begin(request, target, estimate_s=estimate_s)

        survivors, free = len(base.kept(source)), self.nodes.free_slots()
        if free is None or survivors + free >= source.layout.workers:
            most: Layout | None = source.layout  # the same shape, on other nodes
        else:
            most = policy.best(min(survivors + free, self.queue.ceiling))
        if most is not None and most.workers > survivors:
            with_joiners = way(most)
            share = COMFORTABLE if self._to_boot(with_joiners.request) else 1.0
            if with_joiners.estimate_s <= share * window_s:
                return with_joiners
        choices = policy.choices(survivors)
        alike = [each for each in choices if each.split == source.layout.split]
        smaller = []
        # Each takes time to place, and to count its bytes, of which the window may have none.
        for layout in dict.fromkeys([*choices[:MOST_PLACED], *alike[:MOST_ALIKE]]):
            smaller.append(way(layout))
            if smaller[-1].estimate_s <= window_s:
                return smaller[-1]
        if not smaller and most is not None:
            smaller = [way(most)]
        return min(smaller, key=lambda each: each.estimate_s, default=None)
