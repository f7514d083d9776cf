"""What the nodes at hand call for: growing onto granted ones, leaving those that are taken away."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.coordinator.services import Services
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.policy import LayoutPolicy
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.node_events import Node, NodeGone, NodeGranted, NodeWarned
from liver_hpc.run.nodes import Capacity
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.records import StepRecord
from liver_hpc.run.requests import GROWTH, Wish

log = logging.getLogger(__name__)

MOST_LEAVES = 3
"""Handoffs away from a node that may fail before the state goes to disk instead."""
PATIENT_EXITS = 4.0
"""A window of so many exit deadlines leaves time to wait for agents that are ending."""
COMFORTABLE = 0.5
"""Share of a window that a handoff with joiners may take: they have to boot first."""


@dataclass(frozen=True)
class LastResort:
    """No handoff gets the workers off their nodes in time: the state goes to disk."""

    reason: str


@dataclass(frozen=True)
class _Way:
    """One way to leave: the layout, how many joiners it takes, its estimated length."""

    layout: Layout
    joiners: int
    total_s: float


class Fleet:
    """Used by the event loop alone."""

    def __init__(
        self, config: RunConfig, services: Services, registry: WorkerRegistry, recorder: RunRecorder
    ) -> None:
        self.capacity = Capacity(config.cluster.workers_per_node)
        self.notices = NoticeBook(services.metrics.add_notice)
        self.policy = LayoutPolicy(config, services.recipe.spec)
        self.estimator = HandoffEstimator(config, services.recipe.spec)
        self._config = config
        self._services = services
        self._clock = services.clock
        self._registry = registry
        self._recorder = recorder
        self._ceiling = config.workers.max
        self._granted_s = -math.inf
        self._grow_at_s = math.inf
        self._failed_growths = 0
        self._failed_leaves = 0
        self._overtaken = -1  # the generation of the handoff that was called off last
        self._idle_since: dict[str, float] = {}
        self._wanted = -1
        self._dead_end: tuple[int, frozenset[str], int | None] | None = None

    # ---- nodes come and go

    def granted(self, event: NodeGranted, at_start: bool) -> bool:
        """False when nothing is new about the node. `at_start`: held before the first launch."""
        if not self.capacity.grant(event.node):
            return False
        now_s = self._clock.now_s()
        self._idle_since.pop(event.node.name, None)
        self.notices.stays(event.node.name)
        if not at_start:
            self.notices.granted(event.node, now_s)
        if math.isinf(self._granted_s) or self._grow_at_s <= now_s:
            self._granted_s = now_s
        self._grow_at_s = now_s + self._config.policy.settle_s
        return True

    def warned(self, event: NodeWarned) -> bool:
        """False for a node that is not held, and for a warning that only moves the deadline."""
        held = self.capacity.get(event.node)
        if held is None:
            return False
        hurries = self.deadline_s(event.node) is None and event.deadline_s is not None
        self.capacity.warn(event)
        return self.notices.warned(event, held.node.allocation) or hurries

    def deadline_s(self, node: str) -> float | None:
        """By when a node has to be left, epoch seconds; None where nobody has set a time."""
        held = self.capacity.get(node)
        return held.warning.deadline_s if held is not None and held.warning is not None else None

    def gone(self, event: NodeGone) -> tuple[int, ...]:
        """Strikes a node off; the workers of the run that were still on it."""
        held = self.capacity.remove(event.node)
        if held is None:
            return ()
        self._idle_since.pop(event.node, None)
        workers = self._registry.workers_on({event.node}, self._registry.present())
        allocation, now_s = held.node.allocation, self._clock.now_s()
        if not workers and event.node not in self._registry.taken():
            self.notices.left(event.node, now_s)
        self.notices.gone(event.node, allocation, now_s, had_workers=bool(workers))
        return workers

    def tick(self, busy: bool) -> None:
        """Gives back nodes on which nothing runs any more, and says how many are wanted."""
        now_s, taken = self._clock.now_s(), self._registry.taken()
        for held in self.capacity.held():
            name = held.node.name
            if name in taken:
                self._idle_since.pop(name, None)
                continue
            since_s = self._idle_since.setdefault(name, now_s)
            if math.isinf(since_s):
                continue  # given back already
            if held.warning is not None:
                self.notices.left(name, now_s)
            elif busy or not self._unneeded(held.node, now_s - since_s):
                continue
            self._idle_since[name] = math.inf
            self._services.pool.give_back(name)
        wanted = max(0, self._most_workers() - self._slots(burst=False))
        if wanted != self._wanted:
            self._wanted = wanted
            self._services.pool.want(wanted)

    def _unneeded(self, node: Node, idle_s: float) -> bool:
        """Whether the run could have all its workers without a node that nobody takes away."""
        if not node.burst or idle_s < self._config.policy.retry_s:
            return False
        others = self._slots(burst=False) + self._slots(burst=True) - (node.slots or 0)
        return others >= self._most_workers()

    def _slots(self, burst: bool) -> int:
        """Slots on usable nodes that are used, or would be unasked, without those that were given
        back; 0 where there is no bound."""
        taken = self._registry.taken()
        nodes = [
            node
            for node in self.capacity.usable()
            if node.burst == burst and (node.automatic or node.name in taken)
        ]
        back = {name for name, since_s in self._idle_since.items() if math.isinf(since_s)}
        return sum(node.slots or 0 for node in nodes if node.name not in back)

    def _most_workers(self) -> int:
        """The most workers that the run may have, wherever the nodes come from."""
        best = self.policy.best(self._ceiling)
        return best.workers if best is not None else 0

    # ---- the start

    def first_layout(self, preferred: Layout, resumed: bool) -> Layout | None:
        """What to begin with on the nodes at hand; None while they are too few.

        A run that is resumed takes what there is, a new one waits for `workers.initial`.
        """
        room = self.capacity.free_slots({})
        if room is None or (room >= preferred.workers and not resumed):
            return preferred
        automatic = self.capacity.room(())
        return self.policy.best(min(automatic or 0, self._ceiling)) if resumed else None

    def training_begins(self) -> None:
        """Nodes that came before count as granted now: nothing could join them earlier."""
        self._granted_s = self._clock.now_s()

    # ---- growing

    @property
    def ceiling(self) -> int:
        """The most workers that the run grows to by itself."""
        return self._ceiling

    def bound(self, layout: Layout) -> None:
        """Somebody asked for this layout: nothing grows beyond its workers by itself now."""
        self._ceiling = layout.workers

    def recall(self, ceiling: int) -> None:
        """The bound of a life before this one."""
        self._ceiling = ceiling

    def missing_slots(self, world: WorldRef, joiners: int) -> int:
        """How many of so many joiners there is no slot for, those of ending agents counted in."""
        taken = self._registry.taken(ending=False)
        free = self.capacity.free_slots(taken)
        return 0 if free is None else max(0, joiners - free)

    def growth(self, world: WorldRef) -> Wish | None:
        """A handoff onto nodes that were granted, once no more of them come at the moment."""
        if self._clock.now_s() < self._grow_at_s:
            return None
        best = self._best(world)
        if best is None:
            return None
        return Wish(GROWTH, self._granted_s, layout=best)

    def _best(self, world: WorldRef) -> Layout | None:
        """A larger layout than the world's for which there is room."""
        rank_map = world.rank_map
        occupied = {self._registry.node_of(worker) for worker in rank_map.workers}
        room = self.capacity.room(occupied)
        if room is None:
            return None
        best = self.policy.best(min(room, self._ceiling))
        if best is None or best.workers <= rank_map.layout.workers:
            return None
        free = self.capacity.free_slots(self._registry.taken())
        fits = free is None or best.workers - rank_map.layout.workers <= free
        return best if fits else None

    def waits_for_slots(self, world: WorldRef, joiners: int | None) -> bool:
        """Whether to wait for agents that are ending, since they hold slots that are needed.

        joiners: how many are to be started; None to leave nodes with whatever slots there are,
        where no deadline is near.
        """
        if not self._registry.ending():
            return False
        if joiners is not None:
            free = self.capacity.free_slots(self._registry.taken())
            return free is not None and free < joiners
        doomed = self._registry.workers_on(self.doomed_nodes(), world.rank_map.workers)
        occupied = {self._registry.node_of(worker) for worker in doomed}
        patience_s = PATIENT_EXITS * self._config.deadlines.exit_s
        return bool(doomed) and self._window_s(occupied) > patience_s

    # ---- leaving

    def _window_s(self, nodes: Iterable[str]) -> float:
        """Seconds until the first of the nodes is taken, at least 0; infinite without deadline."""
        deadlines = [self.deadline_s(node) for node in nodes]
        known = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        return max(0.0, min(known, default=math.inf) - self._clock.now_s())

    def doomed_nodes(self) -> frozenset[str]:
        """Nodes that have to be left."""
        return frozenset(held.node.name for held in self.capacity.held() if held.warning)

    def can_do_without(self, world: WorldRef, node: str) -> bool:
        """Whether there is a layout for the workers that are left when a node goes."""
        survivors = [w for w in world.rank_map.workers if self._registry.node_of(w) != node]
        taken = self._registry.taken()
        free = sum(
            (other.slots or 0) - len(taken.get(other.name, ()))
            for other in self.capacity.usable()
            if other.name != node
        )
        return self.policy.best(len(survivors) + free) is not None

    def text(self) -> str:
        """All nodes in a line."""
        return self.capacity.describe(self._registry.taken())

    def leave(self, world: WorldRef, next_generation: int) -> Wish | LastResort | None:
        """How the workers get off the nodes that have to be left; None when none is on any."""
        nodes = self.doomed_nodes()
        doomed = self._registry.workers_on(nodes, world.rank_map.workers)
        if not doomed:
            return None
        occupied = sorted({self._registry.node_of(worker) for worker in doomed})
        held = (self.capacity.get(name) for name in occupied)
        warnings = [known.warning for known in held if known is not None and known.warning]
        reasons = ", ".join(sorted({warning.reason for warning in warnings}))
        deadlines = [w.deadline_s for w in warnings if w.deadline_s is not None]
        deadline_s, window_s = min(deadlines, default=None), self._window_s(occupied)
        text = f"leaving {', '.join(occupied)}: {reasons}"
        if math.isinf(window_s) and self._dead_end == self._situation(world):
            return None  # nobody takes the node away: the run stays where it is
        way = self._way_out(world, doomed, window_s)
        nowhere = "there is nowhere else to run"
        if self._failed_leaves >= MOST_LEAVES:
            nowhere = f"{self._failed_leaves} handoffs have failed"
            way, text = None, f"{text}; {nowhere}"
        if way is None and math.isinf(window_s):
            self._dead_end = self._situation(world)
            self.notices.decided(occupied, f"stays: {nowhere}", -1)
            log.warning("%s: stays: %s", text, nowhere)
            return None
        disk_s = self.estimator.checkpoint_s(world.rank_map)
        too_slow = way is not None and self.estimator.measured and way.total_s > window_s
        if way is None or (too_slow and disk_s <= window_s):
            live = "none" if way is None else f"{way.total_s:.1f} s"
            action = f"to disk (live: {live}, disk: {disk_s:.1f} s, window: {window_s:.1f} s)"
            self.notices.decided(occupied, action, -1, disk_s)
            return LastResort(f"{text}; {action}")
        action = f"live to {way.layout}"
        if way.total_s > window_s:
            action += f", estimated {way.total_s:.1f} s for a window of {window_s:.1f} s"
            log.warning("%s: the deadline may not be met: %s", text, action)
        self.notices.decided(occupied, action, next_generation, way.total_s)
        made_s = min(warning.at_s for warning in warnings)
        return Wish(text, made_s, layout=way.layout, without=doomed, deadline_s=deadline_s)

    def _situation(self, world: WorldRef) -> tuple[int, frozenset[str], int | None]:
        """What a way out depends on."""
        free = self.capacity.free_slots(self._registry.taken())
        return world.generation, self.doomed_nodes(), free

    def _way_out(self, world: WorldRef, doomed: tuple[int, ...], window_s: float) -> _Way | None:
        """The best layout that can be reached in the window, or else the one reached soonest."""
        survivors = world.rank_map.layout.workers - len(doomed)
        free = self.capacity.free_slots(self._registry.taken())
        present = world.rank_map.layout
        if free is None or survivors + free >= present.workers:
            most: Layout | None = present  # the same shape, on other nodes
        else:
            most = self.policy.best(min(survivors + free, self._ceiling))
        if most is not None and most.workers > survivors:
            way = self._way(world, doomed, most)
            if way.total_s <= COMFORTABLE * window_s:
                return way
        smaller = [self._way(world, doomed, layout) for layout in self.policy.choices(survivors)]
        for way in smaller:
            if way.total_s <= window_s:
                return way
        if not smaller and most is not None:
            smaller = [self._way(world, doomed, most)]
        return min(smaller, key=lambda way: way.total_s, default=None)

    def _way(self, world: WorldRef, doomed: tuple[int, ...], layout: Layout) -> _Way:
        rank_map = world.rank_map
        kept = [worker for worker in rank_map.workers if worker not in doomed]
        joiners = max(0, layout.workers - len(kept))
        fresh = range(max(rank_map.workers) + 1, max(rank_map.workers) + 1 + joiners)
        target = self._services.place(
            self._services.recipe.spec, rank_map, layout, (*sorted(kept), *fresh)
        )
        return _Way(layout, joiners, self.estimator.estimate(rank_map, target, joiners).total_s)

    # ---- what is learnt

    def step_done(self, world: WorldRef, step: StepRecord) -> None:
        """An undisturbed step shows how fast its layout is."""
        if not step.phase and step.generation == world.generation:
            took_s = step.ended_s - step.started_s
            self.policy.observe(world.rank_map.layout, took_s)
            self.estimator.observe_step(took_s)

    def handoff_ended(self, wish: Wish | None, ended: Ended) -> None:
        """Learns from it how long handoffs take, and when, and whether, to try again."""
        if self._recorder.last_attempt is not None:
            self.estimator.observe(self._recorder.last_attempt)
        completed = ended.outcome == "completed"
        now_s = self._clock.now_s()
        if completed:
            self._failed_growths = self._failed_leaves = 0
            on = {self._registry.node_of(worker) for worker in ended.world.rank_map.workers}
            self.notices.used(on, f"joined by {ended.world.rank_map.layout}", ended.generation)
        elif ended.generation == self._overtaken:
            pass  # it did not fail: there was something more urgent
        elif wish is not None and wish.origin == GROWTH:
            self._failed_growths += 1
            pause_s = self._config.policy.retry_s * 2 ** min(self._failed_growths - 1, 6)
            self._grow_at_s = now_s + pause_s
        elif wish is not None and wish.without:
            self._failed_leaves += 1

    def overtaken(self, generation: int) -> None:
        """The handoff in progress is about to be called off, as nodes have to be left at once."""
        self._overtaken = generation

    def merged(self, nodes: Iterable[str], generation: int) -> None:
        """The handoff in progress leaves these nodes anyway."""
        self.notices.decided(nodes, f"merged into generation {generation}", generation)
