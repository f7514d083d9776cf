"""The elastic policy: which nodes and requests there are, and which handoff begins next.

`decide.py` says what is best; here it is done, and what it leads to is kept.
"""

from __future__ import annotations

import math
from contextlib import suppress

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import RequestRefused
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ramp import batch_of
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import Failed, StepDone
from liver_hpc.run import actions as a
from liver_hpc.run.agents import STANDBY
from liver_hpc.run.decide import Begin, Decider, Decline, Drop, Estimates, Stay, ToDisk, Wait
from liver_hpc.run.events import Memory, Node, NodeGone, NodeGranted, NodeWarned
from liver_hpc.run.handoffs import Handoffs
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.notices import NoticeBook
from liver_hpc.run.observation import Observer
from liver_hpc.run.records import ReconfigurationRecord
from liver_hpc.run.requests import (
    DRAINS,
    GROWTH,
    IN_PLACE,
    OPERATOR,
    ReconfigurationRequest,
    RequestQueue,
)

MOST_PAUSE_DOUBLINGS = 6
"""Growing that fails or does not repay, again and again, is tried after ever longer pauses, up to
2**6 of them."""


class ElasticPolicy:
    """The nodes at hand, the queue of requests, and what was learnt.

    drained: nodes that operators have drained, or the policy for them, held or not, each with the
    warning that held before and holds again once the drain is undone. burst_over: why no burst
    nodes come any more; empty while they may. wanted: how many workers burst nodes were asked for
    last; -1 before.
    """

    def __init__(
        self,
        config: RunConfig,
        clock: Clock,
        parts: tuple[RequestQueue, HeldNodes, Estimates, NoticeBook],
        handoffs: Handoffs,
        out: list[a.Action],
    ) -> None:
        self.queue, self.nodes, self.estimates, self.notices = parts
        self.drained: dict[str, NodeWarned | None] = {}
        self.burst_over = ""
        self._enough: int | None = None  # workers, from whom growing was declined for good
        self._config = config
        self._clock = clock
        self.handoffs = handoffs
        self._agents = self.nodes.agents
        self.observer = Observer(config, clock, parts, out.append)
        self._out = out
        self._failed_growths = 0
        self._overtaken = -1  # the generation of the handoff that was called off last
        self._orphaned = -1  # of the one in progress when a coordinator was lost last
        self._without_room = -1  # of the one last for which a device had no room
        self._again: ReconfigurationRequest | None = None  # has one more turn for a loss
        self.wanted = -1

    # ---- from one start to the next

    def recall(self, memory: Memory) -> None:
        """What operators asked for before this start."""
        if memory.ceiling is not None:
            self.queue.asked = memory.ceiling
        for node in memory.drained:
            self.drained[node] = None
            self._out.append(a.Avoid(node))

    def _remember(self) -> None:
        self._out.append(a.Remember(self.queue.asked, tuple(sorted(self.drained))))

    # ---- requests

    def ask(self, request: ReconfigurationRequest, world: WorldRef | None, busy: str) -> str:
        """Queues a request, and says what it waits for; RequestRefused where there is no point in
        it, or no room and nothing to wait for.

        world: what trains, or is about to; None before. busy: what holds up every request now.
        """
        # A request that waits is judged again when its turn comes; only a replacement of a worker
        # that nobody knows is refused at once.
        waits = bool(busy) and (request.replace is None or self.handoffs.involves(request.replace))
        if world is not None and not waits:
            pointless = request.pointless(world.rank_map)
            if pointless:
                return self._stays(request, pointless)
        waits_for = "" if world is None or busy else self._waits_for_nodes(request, world)
        withdrawn = None
        if request.layout is not None:
            withdrawn = self.queue.awaits
            self.queue.asked, self.queue.missing = request.layout.workers, None
            self.queue.awaits = request if waits_for else None
            self._remember()
        replaced = None if waits_for else self.queue.add(request)
        if waits_for:
            answer = waits_for
        elif not busy:
            answer = f"started: {request}"
        elif replaced is not None:
            answer = f"merged: replaces queued {replaced}; {request} waits behind {busy}"
        else:
            answer = f"queued: {request} waits behind {busy}"
        return answer if withdrawn is None else f"{answer}; {withdrawn} is withdrawn"

    def _stays(self, request: ReconfigurationRequest, pointless: str) -> str:
        """That a run stays in the layout that it has and is asked for: what waited to change that
        is withdrawn, and it grows to no more. RequestRefused where neither makes a difference."""
        layout, queue = request.layout, self.queue
        withdrawn = [] if layout is None else queue.withdraw_before(request)
        if layout is None or (not withdrawn and queue.ceiling == layout.workers):
            raise RequestRefused(pointless)
        queue.asked, queue.missing = layout.workers, None
        self._remember()
        what = "".join(f"; {earlier} is withdrawn" for earlier in withdrawn)
        return f"stays in {layout}{what}; the run grows no further by itself"

    def _waits_for_nodes(self, request: ReconfigurationRequest, world: WorldRef) -> str:
        """That a request has to wait for nodes which the run asks for; empty when there is room.

        Raises RequestRefused when there is none and nothing to wait for, or too little.
        """
        joiners, free = request.joiners(world.rank_map), self.nodes.free_slots(ending=False)
        missing = 0 if free is None else max(0, joiners - free)
        if not missing:
            return ""
        short = f"{request} wants {missing} more free slots; held: {self.nodes.describe()}"
        if request.layout is None or self._config.cluster.slurm.burst is None:
            raise RequestRefused(short)
        if self.burst_over:
            raise RequestRefused(f"{short}; no burst nodes: {self.burst_over}")
        if missing > (to_come := self.slots_to_come()):
            raise RequestRefused(f"{short}; burst.max_nodes allows {to_come} more")
        return f"waits for burst nodes: {short}"

    def lost(self, before: Layout, now: Layout) -> None:
        """Workers were lost. Where nodes take any number, others come in their place; else the run
        grows onto what room there is, as always."""
        self._enough = None
        missing = self.queue.missing or before
        if now.workers < missing.workers and self.nodes.free_slots() is None:
            self.queue.missing = missing
            self.nodes.granted_s = self.nodes.grow_at_s = self._clock.now_s()

    # ---- nodes that come

    def granted(self, event: NodeGranted, at_start: bool) -> None:
        """A node is held. `at_start`: it was, before the first launch."""
        node, now_s = event.node, self._clock.now_s()
        if not self.nodes.grant(node):
            return
        self.notices.stays(node.name)
        if not at_start:
            self.notices.granted(node, now_s)
        if math.isinf(self.nodes.grow_at_s) or self.nodes.grow_at_s <= now_s:
            self.nodes.granted_s = now_s
        self.nodes.grow_at_s = now_s + self._config.policy.settle_s
        if node.name in self.drained:  # it is not used again, whoever grants it
            self.drained[node.name] = None
            self.warned(NodeWarned(node.name, OPERATOR, now_s))
        if node.name:  # else it is this machine, which nobody grants
            self._out.append(a.Note(f"node granted: {node.name} ({node.allocation})"))
        leaves = self.nodes[node.name].warning is not None
        if self._config.workers.warm and node.automatic and not (at_start or leaves):
            self._agents.start(node.name)  # it imports while it is decided what becomes of the node

    def first_layout(self, preferred: Layout, resumed: bool, more: int = 0) -> Layout | None:
        """What to begin with on the nodes at hand, and `more` slots; None while they are too few.

        A run that is resumed takes what there is, a new one waits for `workers.initial`.
        """
        room = self.nodes.free_slots()
        if room is None or (room + more >= preferred.workers and not resumed):
            return preferred
        automatic = (self.nodes.room(()) or 0) + more
        return self.estimates.policy.best(min(automatic, self.queue.bound)) if resumed else None

    def slots_to_come(self) -> int:
        """Those of the burst nodes that may be held besides the usable ones."""
        cluster = self._config.cluster
        burst = cluster.slurm.burst
        if burst is None or self.burst_over:
            return 0
        held = sum(node.slots or 0 for node in self.nodes.usable() if node.burst)
        return max(0, burst.max_nodes * cluster.slots(burst) - held)

    def no_more_burst(self, reason: str) -> None:
        """No burst nodes will be asked for; what waits for them is dropped."""
        self.burst_over = reason
        self._out.append(a.Note(f"no burst nodes will be asked for: {reason}"))
        if (request := self.queue.awaits) is not None:
            self.queue.awaits = None
            self._out.append(a.Note(f"dropped: {request}: no burst nodes: {reason}"))

    # ---- nodes to be left

    def warned(self, event: NodeWarned) -> bool:
        """A node has to be left. False for one that is not held, and for a warning that only moves
        a deadline that was known, and leaves half of the time at least."""
        held = self.nodes.get(event.node)
        if held is None:
            return False
        now_s = self._clock.now_s()
        before_s = self.nodes.window_s((event.node,), now_s)
        held.warning = event
        window_s = self.nodes.window_s((event.node,), now_s)
        hurries = window_s < before_s / 2
        lingering = self._agents.lingering
        for worker in self._agents.workers_on({event.node}, tuple(lingering)):
            stays_s = lingering[worker].remaining_s()
            self.nodes.linger((worker,), stays_s, now_s)
        if not self.notices.warned(event, held.node.allocation) and not hurries:
            return False
        window = "no deadline" if event.deadline_s is None else f"{window_s:.1f} s left"
        self._out.append(a.Note(f"node {event.node} has to be left: {event.reason}, {window}"))
        return True

    def overtake(self, world: WorldRef) -> None:
        """A node that has to be left does not wait behind another handoff: that one is called off,
        unless it leaves the nodes in question anyway."""
        handoffs, doomed = self.handoffs, self.nodes.doomed()
        request, attempt = handoffs.request, handoffs.attempt
        if attempt is None or request is None or not handoffs.can_be_cancelled:
            return  # once it is over, the next decision sees to it
        members = world.rank_map.workers
        stays = attempt.target_workers or {*members} - {*request.without}
        joins = self._agents.launched_on(doomed, handoffs.generation)
        if joins or self._agents.workers_on(doomed, {*stays, *attempt.joiners}):
            self.call_off(f"nodes {sorted(doomed)} have to be left at once")
        elif handoffs.boots and self._has_less_time(request, world):
            self.call_off("there is less time than it was begun for")
        elif self._agents.workers_on(doomed, members):
            merged = f"merged into generation {handoffs.generation}"
            self.notices.decided(doomed, merged, handoffs.generation)

    def _has_less_time(self, request: ReconfigurationRequest, world: WorldRef) -> bool:
        """Whether nodes are taken before half of the time that there was to leave them."""
        if request.deadline_s is None:
            return False
        now_s = self._clock.now_s()
        leaving = {*request.without} & {*world.rank_map.workers}
        left = {self._agents.node_of(worker) for worker in leaving}
        return self.nodes.window_s(left, now_s) < (request.deadline_s - now_s) / 2

    def call_off(self, reason: str) -> None:
        """Ends a handoff that can be cancelled and has not failed: what was asked for waits for its
        next turn."""
        request = self.handoffs.request
        if request is not None and request.asked_for:
            self.queue.put_back(request)
        self._overtaken = self.handoffs.generation
        self.handoffs.cancel(reason)

    def took_over(self) -> None:
        """Another coordinator has. With the lost one its store is gone, and its rendezvous: where a
        handoff fails, as it may for that, what was asked for has one more turn."""
        self.burst_over = ""  # until the pool of this coordinator says so, too
        if self.handoffs.can_be_cancelled:
            self._orphaned = self.handoffs.generation

    def no_room(self, failed: Failed) -> None:
        """A device has no room for both worlds of the handoff in progress: that is made again at
        once, in bounded memory."""
        attempt = self.handoffs.attempt
        if attempt is None or attempt.generation != failed.generation or attempt.request.bounded:
            return
        source, target = attempt.request.source.rank_map, attempt.request.target
        self.estimates.handoffs.observe_no_room(source, target, failed.reason)
        self._without_room = failed.generation

    def gone(self, event: NodeGone) -> tuple[int, ...]:
        """Strikes a node off; the workers of the run that were still on it."""
        held = self.nodes.pop(event.node, None)
        self._out.append(a.Note(f"node {event.node} is gone: {event.reason}"))
        if held is None:
            return ()
        workers = self._agents.workers_on({event.node}, self._agents.present())
        allocation, now_s = held.node.allocation, self._clock.now_s()
        if not workers and event.node not in self._agents.taken():
            self.notices.left(event.node, now_s)
        self.notices.gone(event.node, allocation, now_s, had_workers=bool(workers))
        return workers

    # ---- drains

    def drain(
        self, node: str, within_s: float | None, world: WorldRef | None, reason: str = OPERATOR
    ) -> str:
        """An operator wants a node to be left, or the policy, for a `reason` of DRAINS;
        RequestRefused for one that is not held."""
        held = self.nodes.get(node)
        if held is None or not node:
            names = ", ".join(filter(None, self.nodes)) or "none by name"
            raise RequestRefused(f"node {node!r} is not held by the run; nodes are {names}")
        if world is not None and self.best_without(node, world) is None:
            raise RequestRefused(
                f"no layout is allowed without {node}; held: {self.nodes.describe()}"
            )
        now_s = self._clock.now_s()
        window_s = within_s or self._config.policy.drain_window_s
        self._out.append(a.Avoid(node))
        self.drained.setdefault(node, None)
        self._remember()
        known_s = held.deadline_s
        if known_s is not None and known_s <= now_s + window_s:
            return f"{node} is being left already, within {max(0.0, known_s - now_s):.1f} s"
        if held.warning is not None and held.warning.reason not in DRAINS:
            self.drained[node] = held.warning
        if self.warned(NodeWarned(node, reason, now_s, now_s + window_s)) and world is not None:
            self.overtake(world)
        return f"leaving {node} within {window_s:g} s"

    def best_without(self, node: str, world: WorldRef) -> Layout | None:
        """The layout for which there is room when a node goes, and all that have to be left; None
        where there is none."""
        slots = self.nodes.slots_without(node)
        return self.estimates.policy.best(len(world.rank_map.workers) if slots is None else slots)

    def undo_drain(self, node: str, world: WorldRef | None) -> str:
        """An operator wants a node to be used again; RequestRefused for one that none drained.

        A handoff that is leaving it goes on; the run grows onto it later.
        """
        if node not in self.drained:
            drained = ", ".join(sorted(self.drained)) or "none"
            raise RequestRefused(f"node {node!r} is not drained; drained nodes are {drained}")
        before = self.drained.pop(node)
        self._out.append(a.Readmit(node))
        self._remember()
        held = self.nodes.get(node)
        if held is None:
            return f"{node} is not held; it may be asked for again"
        if held.warning is not None and held.warning.reason in DRAINS:
            if before is None:
                self.granted(NodeGranted(held.node), at_start=world is None)
            elif self.warned(before) and world is not None:
                self.overtake(world)
            held = self.nodes.get(node)
        if held is not None and held.warning is not None:
            return f"{node} is not drained any more, but to be left: {held.warning.reason}"
        return f"{node} is used again"

    # ---- what happens next

    def next_handoff(
        self, world: WorldRef, step: int, catching_up: bool, redone_steps: float
    ) -> ToDisk | None:
        """Begins the next handoff that there is a reason for; the run must train `world`, have done
        `step` steps, and have no handoff in progress. catching_up, redone_steps: as `Decider` has
        them. Where none gets the workers off their nodes in time, returns that."""
        horizon_s = self._config.policy.horizon_s
        self.observer.burst_wanted(world, step)
        while self.handoffs.idle:
            if self._put_off(world):
                continue
            now_s = self._clock.now_s()
            situation = (self.nodes, world, self.queue, self.estimates, now_s)
            left = self.queue.steps_left(step)
            decider = Decider(*situation, left, horizon_s, catching_up, redone_steps)
            decision = decider.decide()
            match decision:
                case Wait():
                    return None
                case ToDisk():
                    self.notices.decided(decision.nodes, decision.action, -1, decision.estimate_s)
                    return decision
                case Stay():
                    self.nodes.stuck = self.nodes.situation(world)
                    self.notices.decided(decision.nodes, decision.action, -1)
                    self._out.append(a.Log(decision.reason))
                case Decline():  # it looks again later: steps may show other times
                    self._pause_growing()
                    self._enough = world.rank_map.layout.workers if decision.for_good else None
                    stays = f"stays in {world.rank_map.layout}: to {decision.layout}"
                    self._out.append(a.Note(f"{stays}, {decision.reason}"))
                case Drop():
                    self._had_its_turn(decision.request)
                    self._out.append(a.Note(f"dropped: {decision.request}: {decision.reason}"))
                case Begin() if self.observer.only_watches(decision):
                    if (to_disk := self.observer.instead_of(decision, world, step)) is not None:
                        return to_disk
                case Begin():
                    self._begin(decision, world)
        return None

    def _put_off(self, world: WorldRef) -> bool:
        """Whether the request whose turn it is waits on, as its burst nodes are to come."""
        request = self.queue.first
        with suppress(RequestRefused):  # there is nothing to wait for: the handoff says what fails
            if request is not None and (waits_for := self._waits_for_nodes(request, world)):
                self._had_its_turn(request)
                self.queue.awaits = request
                self._out.append(a.Note(waits_for))
                return True
        return False

    def _had_its_turn(self, request: ReconfigurationRequest) -> None:
        earlier = self.queue.awaits
        self.queue.had_its_turn(request)
        if earlier not in (None, request, self.queue.awaits):
            self._out.append(a.Note(f"{earlier} is withdrawn for {request}"))

    def _pause_growing(self) -> None:
        doublings = min(self._failed_growths, MOST_PAUSE_DOUBLINGS)
        self._failed_growths += 1
        self.nodes.grow_at_s = self._clock.now_s() + self._config.policy.retry_s * 2**doublings

    def _begin(self, decision: Begin, world: WorldRef) -> None:
        request, generation = decision.request, self.handoffs.generation + 1
        self.notices.decided(decision.nodes, decision.action, generation, decision.estimate_s)
        if decision.late:
            self._out.append(
                a.Log(f"{request.origin}: the deadline may not be met: {decision.action}")
            )
        self._had_its_turn(request)
        self._enough = None
        self._out.append(a.Note(f"generation {generation}: {request}, from {world.rank_map}"))
        why = self._bounded_because(generation, world.rank_map, decision.target)
        steps_s = self.estimates.handoffs.steps_s(world.rank_map, decision.target)
        self.handoffs.start(request, world, decision.target, bool(why), steps_s)

    def _bounded_because(self, generation: int, source: RankMap, target: RankMap) -> str:
        """Why a handoff is made in bounded memory; the log then says so, and what it costs."""
        handoffs = self.estimates.handoffs
        why = handoffs.bounded_because(source, target)
        if why:
            lost_s, saved_s = handoffs.lost_s(source, target), handoffs.written_s(source)
            costs = f"about {lost_s:.1f} s of training, {saved_s:.1f} s of them for a checkpoint"
            self._out.append(
                a.Log(f"generation {generation} in bounded memory, for {costs}: {why}")
            )
        return why

    def let_spares_go(self) -> None:
        """Has kept joiners, and standbys that boot, leave nodes that have to be left."""
        doomed, leave = self.nodes.doomed(), "its node has to be left"
        there = self._agents.workers_on(doomed, self._agents.spare(clearing=True))
        self._agents.let_go(there, leave)
        self._agents.dismiss(STANDBY, leave, doomed)

    def look_after_nodes(self) -> None:
        """Gives back nodes that have to be left, or are not needed, once nothing runs on them, and
        says how many are wanted."""
        now_s = self._clock.now_s()
        busy = bool(self.queue.waiting) or not self.handoffs.idle
        self.nodes.note_idle(now_s)
        for held in self.nodes.values():
            if held.idle_since_s is None or held.given_back:
                continue
            idle_s = now_s - held.idle_since_s
            if held.warning is None and (busy or not self._unneeded(held.node, idle_s)):
                continue
            self.notices.left(held.node.name, now_s)
            held.given_back = True
            self._out.append(a.GiveBack(held.node.name))
        steady = self.nodes.steady_slots(with_burst=False)
        wanted = max(0, self._most_workers() - steady)
        if wanted != self.wanted:
            self.wanted = wanted
            self._out.append(a.WantWorkers(wanted))

    def _unneeded(self, node: Node, idle_s: float) -> bool:
        """Whether the run could have all its workers without a node that nobody takes away."""
        burst = self._config.cluster.slurm.burst
        if not node.burst or idle_s < self._config.policy.retry_s:
            return False
        held = sum(each.node.burst and not each.given_back for each in self.nodes.values())
        if burst is not None and held <= burst.min_nodes:
            return False
        steady = self.nodes.steady_slots(with_burst=True)
        return steady - (node.slots or 0) >= self._most_workers()

    def _most_workers(self) -> int:
        """The most workers that the run may have, wherever the nodes come from."""
        bound = self.queue.bound
        best = self.estimates.policy.best(
            bound if self._enough is None else min(self._enough, bound)
        )
        asked = [request.layout for request in self.queue.not_granted]
        return max((layout.workers for layout in (best, *asked) if layout is not None), default=0)

    def _surplus(self, trains: RankMap) -> list[int]:
        """Kept joiners of whom neither growth nor a request that waits has any use, and that are
        no standbys."""
        growth = self._most_workers() - len(trains.workers)
        useful = max(0, growth, *(each.joiners(trains) for each in self.queue.waiting))
        standbys = self.nodes.standbys()[: self._config.workers.standby]
        return [worker for worker in self.nodes.kept()[useful:] if worker not in standbys]

    # ---- what is learnt

    def step_done(self, step: StepDone, world: WorldRef, slowed: bool) -> None:
        """A step of the world that trains shows how fast its layout is, but with a node that is
        drained, as for straggling. One that PREPARE has `slowed` shows what a handoff costs besides
        its pause."""
        took_s, batch = step.ended_s - step.started_s, batch_of(self._config.train, step.step)
        if slowed:
            self.estimates.handoffs.observe_slowed(took_s, batch)
            return
        on = map(self._agents.node_of, world.rank_map.workers if self.drained else ())
        if self.drained.keys().isdisjoint(on):
            self.estimates.policy.observe(world.rank_map.layout, took_s, batch)
        self.estimates.handoffs.observe_step(took_s, batch)

    def handoff_ended(self, ended: Ended, source: WorldRef, record: ReconfigurationRecord) -> None:
        """How long handoffs take, and when, and whether, to try again."""
        request, trains = self.handoffs.request, ended.world.rank_map
        if ended.outcome == "completed":
            self.estimates.handoffs.observe(record, source.rank_map, trains)
            self._failed_growths = self.estimates.failed_leaves = 0
            if trains.layout == self.queue.missing or (request is not None and request.asked_for):
                self.queue.missing = None
            self._agents.let_go(self._surplus(trains), f"{trains.layout} has no use for it")
            on = {self._agents.node_of(worker) for worker in trains.workers}
            joined = f"joined by {trains.layout}"
            self.notices.used(on, joined, ended.generation)
            return
        self.estimates.handoffs.observe_aborted()
        here = self._agents.present()
        lost = ended.outcome == "failed" and not {*source.rank_map.workers}.issubset(here)
        no_room = ended.generation == self._without_room
        at_fault = not lost and not no_room and ended.generation != self._orphaned
        if ended.generation == self._overtaken:
            pass  # it did not fail: there was something more urgent
        elif request is not None and request.asked_for:
            stays = trains == source.rank_map  # else it has been granted
            if stays and (no_room or (not at_fault and request != self._again)):
                if not no_room:
                    self._again = request
                self.queue.put_back(request)
        elif request is not None and request.origin in (GROWTH, IN_PLACE):
            if not no_room:
                self._pause_growing()
        elif request is not None and request.without and at_fault:
            self.estimates.failed_leaves += 1
