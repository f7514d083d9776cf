"""Which shape the run takes next: what is wished for, and what the nodes at hand call for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from liver_hpc.config.schema import NoticeSection, RunConfig
from liver_hpc.coordinator.fleet import Fleet, LastResort
from liver_hpc.coordinator.handoffs import Handoffs
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.coordinator.services import Services
from liver_hpc.errors import RequestRefused
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.run.node_events import (
    EndNear,
    NodeGone,
    NodeGranted,
    NodeWarned,
    PoolEvent,
    PoolNote,
)
from liver_hpc.run.requests import OPERATOR, Wish, WishList
from liver_hpc.run.state import RunState


class Run(Protocol):
    """What is steered."""

    fleet: Fleet
    handoffs: Handoffs
    state: RunState
    world: WorldRef | None

    @property
    def first_generation(self) -> int: ...

    def note(self, text: str) -> None: ...
    def lost(self, worker: int, reason: str) -> None: ...
    def stop(self, why: str, checkpoint: bool = ..., then: RunState = ...) -> str: ...
    def begin_again(self, reason: str) -> None: ...


class Steering:
    """Starts one handoff after the other; used by the event loop alone."""

    def __init__(
        self, config: RunConfig, services: Services, registry: WorkerRegistry, run: Run
    ) -> None:
        self._config = config
        self._clock = services.clock
        self._pool = services.pool
        self._registry = registry
        self._run = run
        self._fleet = run.fleet
        self._handoffs = run.handoffs
        self._wishes = WishList(config, services.recipe)
        # By operators, each with the warning that held before, and holds again after an undo.
        self._drained: dict[str, NodeWarned | None] = {}

    @property
    def drained(self) -> frozenset[str]:
        """The nodes that operators have drained, held or not."""
        return frozenset(self._drained)

    def recall(self, drained: Iterable[str]) -> None:
        """Those of a life before this one."""
        for node in drained:
            self._drained[node] = None
            self._pool.avoid(node)

    # ---- wishes

    @property
    def queued(self) -> tuple[str, ...]:
        """What waits for its turn, as text."""
        return self._wishes.texts()

    def clear(self) -> None:
        """The run is to end: nothing is wished for any more."""
        self._wishes.clear()

    def due(self, step: int) -> list[NoticeSection]:
        """The scripted notices that are raised when step `step` has been done, each once."""
        return self._wishes.due(step)

    def skip(self, step: int) -> None:
        """A life before this one has done `step` steps, and what the run file wanted until then;
        what it asked for last is still the bound for what grows by itself."""
        for notice in self._wishes.due(step - 1):
            try:
                wish = self._wishes.of_notice(notice, self._clock.now_s())
            except RequestRefused:
                continue
            if wish.layout is not None:
                self._fleet.bound(wish.layout)

    def raise_notice(self, notice: NoticeSection) -> None:
        """Asks for what a scripted notice asks for; a refusal is only noted."""
        try:
            self.ask_for(self._wishes.of_notice(notice, self._clock.now_s()))
        except RequestRefused as error:
            self._run.note(f"notice of step {notice.at_step} refused: {error}")

    def wish_of(self, request: ResizeRequest | ReplaceRequest) -> Wish:
        """What a request wishes for; RequestRefused where the run file does not allow it."""
        return self._wishes.of_request(request, self._clock.now_s())

    def ask_for(self, wish: Wish) -> str:
        """Grants a wish now or queues it, and says which; RequestRefused when it does neither."""
        self._check_open()
        training = self._run.state is RunState.TRAINING
        busy = self._handoffs.describe() if training else "the start of the run"
        self._check_point(wish, busy)
        if wish.layout is not None:
            self._fleet.bound(wish.layout)
        if not busy and (waits := self._waits_for_nodes(wish)):
            return waits
        replaced = self._wishes.add(wish)
        self.grant()
        if not busy:
            return f"started: {wish}"
        if replaced is not None:
            return f"merged: replaces queued {replaced}; {wish} waits behind {busy}"
        return f"queued: {wish} waits behind {busy}"

    def _waits_for_nodes(self, wish: Wish) -> str:
        """That a wish has to wait for nodes which the run asks for; empty when there is room.

        Raises RequestRefused when there is none and nothing to wait for.
        """
        world = self._run.world
        assert world is not None
        missing = self._fleet.missing_slots(world, wish.joiners(world.rank_map))
        if not missing:
            return ""
        short = f"{wish} wants {missing} more free slots; held: {self._fleet.text()}"
        if wish.layout is None or self._config.cluster.slurm.burst is None:
            raise RequestRefused(short)
        return f"waits for burst nodes: {short}"

    def _check_open(self) -> None:
        if self._run.state not in (RunState.STARTING, RunState.TRAINING):
            raise RequestRefused("the run is about to end")

    def _check_point(self, wish: Wish, busy: str) -> None:
        """Of a wish that has to wait, only its turn will show whether there is a point in it."""
        world = self._run.world
        if world is None:
            return
        if busy and (wish.replace is None or self._handoffs.involves(wish.replace)):
            return
        pointless = wish.pointless(world.rank_map)
        if pointless:
            raise RequestRefused(pointless)

    # ---- nodes

    def node_event(self, event: PoolEvent) -> None:
        """What the pool tells of the nodes."""
        note = self._run.note
        match event:
            case NodeGranted():
                at_start = self._run.world is None
                if self._fleet.granted(event, at_start):
                    self._keep_off(event.node.name)
                    note(f"node granted: {event.node.name} ({event.node.allocation})")
            case NodeWarned():
                self._node_warned(event)
            case NodeGone():
                self._node_gone(event)
            case EndNear():
                self.end_near(event)
            case PoolNote():
                note(event.text)

    def _keep_off(self, node: str) -> None:
        """What an operator has drained is not used again, whoever grants it."""
        if node in self._drained:
            self._drained[node] = None
            self._fleet.warned(NodeWarned(node, OPERATOR, self._clock.now_s()))

    def _node_gone(self, event: NodeGone) -> None:
        reason = f"node {event.node} is gone: {event.reason}"
        self._run.note(reason)
        if self._begins_on(event.node):
            self._run.begin_again(f"{reason}, before training began")
        for worker in self._fleet.gone(event):
            if self._registry.leave(worker):  # what else is heard of it is heard too late
                self._run.lost(worker, f"its {reason}")

    def _begins_on(self, node: str) -> bool:
        """Whether the run is starting, on this node among others."""
        starting = self._run.state is RunState.STARTING
        return starting and self._registry.launched_on({node}, self._run.first_generation)

    def _node_warned(self, event: NodeWarned) -> None:
        """A node that has to be left does not wait behind another handoff."""
        if not self._fleet.warned(event):
            return
        left_s = None if event.deadline_s is None else event.deadline_s - self._clock.now_s()
        window = "no deadline" if left_s is None else f"{left_s:.1f} s left"
        self._run.note(f"node {event.node} has to be left: {event.reason}, {window}")
        if self._run.state is RunState.STARTING:
            if event.deadline_s is not None and self._begins_on(event.node):
                self._run.begin_again(f"node {event.node} goes before training began")
            return
        self._overtake()
        self.grant()

    def _overtake(self) -> None:
        """Calls off the handoff in progress, unless it leaves the nodes in question anyway."""
        handoffs, nodes, world = self._handoffs, self._fleet.doomed_nodes(), self._run.world
        wish = handoffs.wish
        if wish is None or world is None or not handoffs.can_be_cancelled:
            return  # once it is over, `grant` sees to it
        members = world.rank_map.workers
        target = handoffs.target_workers()
        stays = {*members} - {*wish.without} if target is None else {*target}
        joins = self._registry.launched_on(nodes, handoffs.generation)
        if joins or self._registry.workers_on(nodes, stays):
            if wish.asked_for:
                self._wishes.put_back(wish)
            self._fleet.overtaken(handoffs.generation)
            handoffs.cancel(f"nodes {sorted(nodes)} have to be left at once")
        elif self._registry.workers_on(nodes, members):
            self._fleet.merged(nodes, handoffs.generation)

    def drain(self, node: str, within_s: float | None) -> str:
        """An operator wants a node to be left; RequestRefused for one that is not held."""
        held = self._fleet.capacity.get(node)
        if held is None or not node:
            names = ", ".join(filter(None, self._fleet.capacity.names)) or "none by name"
            raise RequestRefused(f"node {node!r} is not held by the run; nodes are {names}")
        self._check_open()
        if self._run.world is not None and not self._fleet.can_do_without(self._run.world, node):
            raise RequestRefused(f"no layout is allowed without {node}; held: {self._fleet.text()}")
        now_s = self._clock.now_s()
        window_s = within_s or self._config.policy.drain_window_s
        self._pool.avoid(node)
        self._drained.setdefault(node, None)
        warning = held.warning
        known_s = warning.deadline_s if warning is not None else None
        if known_s is not None and known_s <= now_s + window_s:
            return f"{node} is being left already, within {max(0.0, known_s - now_s):.1f} s"
        if warning is not None and warning.reason != OPERATOR:
            self._drained[node] = warning
        self.node_event(NodeWarned(node, OPERATOR, now_s, now_s + window_s))
        return f"leaving {node} within {window_s:g} s"

    def undo_drain(self, node: str) -> str:
        """An operator wants a node to be used again; RequestRefused for one that none drained.

        A handoff that is leaving it goes on; the run grows onto it later.
        """
        self._check_open()
        if node not in self._drained:
            drained = ", ".join(sorted(self._drained)) or "none"
            raise RequestRefused(f"node {node!r} is not drained; drained nodes are {drained}")
        before = self._drained.pop(node)
        self._pool.readmit(node)
        held = self._fleet.capacity.get(node)
        if held is None:
            return f"{node} is not held; it may be asked for again"
        if held.warning is not None and held.warning.reason == OPERATOR:
            self.node_event(before or NodeGranted(held.node))
            held = self._fleet.capacity.get(node)
        if held is not None and held.warning is not None:
            return f"{node} is not drained any more, but to be left: {held.warning.reason}"
        return f"{node} is used again"

    def end_near(self, event: EndNear) -> None:
        """The coordinator's own allocation ends soon: state to disk, and again from there, unless
        its job may not be queued again."""
        again = self._config.cluster.slurm.requeue
        then = RunState.REQUEUE if again else RunState.STOPPED
        self._run.stop(event.reason, checkpoint=True, then=then)

    # ---- what happens next

    def grant(self) -> None:
        """Starts the next handoff that has a point, unless one runs: away from nodes that go,
        then what is wished for, then onto nodes that came."""
        run, fleet = self._run, self._fleet
        while run.state is RunState.TRAINING and self._handoffs.idle:
            assert run.world is not None
            if fleet.waits_for_slots(run.world, None):
                return
            way = fleet.leave(run.world, self._handoffs.generation + 1)
            if isinstance(way, LastResort):
                run.stop(way.reason, checkpoint=True, then=RunState.RESTART)
                return
            wish = way or (self._wishes.pop() if self._wishes else fleet.growth(run.world))
            if wish is None:
                return
            pointless = wish.pointless(run.world.rank_map)
            if pointless:
                run.note(f"dropped: {wish}: {pointless}")
            elif fleet.waits_for_slots(run.world, wish.joiners(run.world.rank_map)):
                if wish.asked_for:
                    self._wishes.put_back(wish)
                return
            else:
                self._handoffs.start(wish, run.world)
