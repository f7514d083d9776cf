"""Performs what the handoff machine asks for: launches, places, sends, records."""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.coordinator.services import Services
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.actions import Action, Ended, FailRun, LaunchJoiners, PlaceTarget, Send
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Event,
    Requested,
    TargetFixed,
    WorkerLost,
    WorldRef,
)
from liver_hpc.protocol.machine import BEFORE_COMMIT, HandoffMachine
from liver_hpc.protocol.messages import (
    Aborted,
    AtBoundary,
    Exit,
    Failed,
    Finished,
    FirstStep,
    Hello,
    Prepared,
    Progress,
    Released,
    Vote,
)
from liver_hpc.protocol.status import HandoffStatus
from liver_hpc.run.nodes import Capacity
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.requests import Wish

log = logging.getLogger(__name__)

OfAttempt = Prepared | AtBoundary | Progress | Vote | FirstStep | Released | Aborted | Failed
"""Messages that belong to the handoff attempt of their generation."""


class Owner(Protocol):
    """Who is told how handoffs end."""

    def note(self, text: str) -> None:
        """Something that an operator would want to see."""

    def handoff_ended(self, ended: Ended) -> None: ...

    def run_failed(self, reason: str) -> None: ...


class Handoffs:
    """One handoff attempt after the other, for the event loop."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        registry: WorkerRegistry,
        capacity: Capacity,
        recorder: RunRecorder,
        owner: Owner,
    ) -> None:
        self._services = services
        self._registry = registry
        self._capacity = capacity
        self._recorder = recorder
        self._owner = owner
        self._machine = HandoffMachine(config.deadlines, services.clock)
        self._events: deque[Event] = deque()
        self._busy = False
        self._wish: Wish | None = None
        self._last_generation = 0

    # ---- what the loop asks

    @property
    def idle(self) -> bool:
        return self._machine.phase is Phase.IDLE and self._recorder.attempt is None

    @property
    def can_be_cancelled(self) -> bool:
        return self._machine.phase in BEFORE_COMMIT

    @property
    def committed_world(self) -> WorldRef | None:
        """The target world while its source is being released, else None."""
        attempt = self._machine.attempt
        if self._machine.phase is not Phase.RELEASE or attempt is None or attempt.target is None:
            return None
        return WorldRef(attempt.generation, attempt.target)

    @property
    def wish(self) -> Wish | None:
        """What the attempt in progress is for; None when there is none."""
        return self._wish if self._machine.attempt is not None else None

    @property
    def last_wish(self) -> Wish | None:
        """What the attempt in progress, or the last one, was for."""
        return self._wish

    @property
    def generation(self) -> int:
        """The target's generation of the attempt in progress, or of the last one."""
        return self._last_generation

    def target_workers(self) -> tuple[int, ...] | None:
        """Who will train after the attempt in progress; None while that is not decided."""
        attempt = self._machine.attempt
        if attempt is None or attempt.target is None:
            return None
        return attempt.target.workers

    def describe(self) -> str:
        """The attempt in progress: "generation 4 (ARMED)"; empty when there is none."""
        attempt = self._machine.attempt
        return f"generation {attempt.generation} ({self._machine.phase})" if attempt else ""

    def identity(self) -> str:
        """The attempt in progress, for the log: "gen 4 TRANSFER"; empty when there is none."""
        attempt = self._machine.attempt
        return f"gen {attempt.generation} {self._machine.phase}" if attempt else ""

    def involves(self, worker: int) -> bool:
        """Whether the attempt in progress knows this worker."""
        attempt = self._machine.attempt
        if attempt is None:
            return False
        return worker in (*attempt.source_workers, *attempt.joiners)

    def status(self) -> HandoffStatus | None:
        attempt, notes = self._machine.attempt, self._recorder.attempt
        if attempt is None or notes is None:
            return None
        return HandoffStatus(
            generation=attempt.generation,
            phase=str(self._machine.phase),
            source=str(attempt.request.source.rank_map.layout),
            target=str(attempt.request.target),
            notice=attempt.request.notice,
            since_s=notes.entered_s.get(self._machine.phase, notes.began_s),
            bytes_done=notes.bytes_done,
            bytes_total=notes.bytes_total,
            waiting_for=attempt.waiting_workers,
        )

    # ---- what the loop tells

    def first_generation(self, generation: int) -> None:
        """The number of the first world; attempts get the next ones."""
        self._last_generation = generation

    def start(self, wish: Wish, world: WorldRef) -> int:
        """Begins a handoff away from `world`; returns the target's generation. Must be idle."""
        self._wish = wish
        self._last_generation += 1
        request = Requested(
            generation=self._last_generation,
            source=world,
            target=wish.target(world.rank_map),
            joiners=wish.joiners(world.rank_map),
            notice=str(wish),
        )
        self._recorder.attempt_begins(request, wish.made_s)
        self._owner.note(f"generation {request.generation}: {wish}, from {world.rank_map}")
        self._feed(request)
        return request.generation

    def joined(self, hello: Hello, generation: int) -> None:
        """A joiner that was launched for the attempt of `generation` has booted."""
        attempt = self._machine.attempt
        if self._machine.phase is Phase.BOOT and attempt and attempt.generation == generation:
            self._feed(hello)
        else:
            gone = Exit(reason=f"the handoff to generation {generation} has ended")
            self._registry.send((hello.worker,), gone)

    def message(self, message: OfAttempt) -> None:
        """A worker's message; one of an attempt that has ended is ignored."""
        attempt, notes = self._machine.attempt, self._recorder.attempt
        if attempt is None or notes is None or message.generation != attempt.generation:
            log.info(
                "ignored, too late: %s of worker %d, generation %d",
                message.type,
                message.worker,
                message.generation,
            )
        elif isinstance(message, Progress):
            notes.observe(message, self._services.clock.now_s())
        else:
            _log_timings(message)
            self._feed(message)

    def finished(self, message: Finished) -> None:
        self._feed(message)

    def lost(self, worker: int, reason: str) -> None:
        """A worker of the attempt or of the world has gone."""
        self._feed(WorkerLost(worker, reason))

    def cancel(self, reason: str) -> None:
        self._feed(Cancelled(reason))

    def tick(self) -> None:
        """Deadlines, and joiners that cannot come any more."""
        deadline, attempt = self._machine.deadline, self._machine.attempt
        if deadline is not None and deadline.expired():
            self._feed(DeadlinePassed())
        elif self._machine.phase is Phase.BOOT and attempt is not None:
            reason = self._boot_failure(attempt.generation)
            if reason:
                self._feed(Cancelled(reason))

    def _boot_failure(self, generation: int) -> str:
        try:
            self._services.rendezvous.check()
        except LiverError as error:
            return str(error)
        return self._registry.fallen(generation)

    # ---- the machine and its actions

    def _feed(self, event: Event) -> None:
        """Handles an event, and those that performing its actions leads to, one by one."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._busy = False

    def _handle(self, event: Event) -> None:
        before = self._machine.phase
        if self._recorder.attempt is not None:
            self._recorder.attempt.observe(event, self._services.clock.now_s())
        actions = self._machine.handle(event)
        phase = self._machine.phase
        if phase is not before and phase is not Phase.IDLE and self._recorder.attempt is not None:
            self._recorder.attempt.entered_s[phase] = self._services.clock.now_s()
            assert self._machine.attempt is not None
            log.info("waiting for %s", self._machine.attempt.waits_for())
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case LaunchJoiners():
                self._launch(action)
            case PlaceTarget():
                self._feed(self._placed(action.joiners))
            case Send():
                self._registry.send(action.workers, action.message)
            case Ended():
                self._ended(action)
            case FailRun():
                self._owner.run_failed(action.reason)

    def _launch(self, action: LaunchJoiners) -> None:
        try:
            seats = self._capacity.seats(action.count, self._registry.taken())
            self._registry.launch(action.generation, action.layout, seats)
        except (LiverError, OSError) as error:
            self._feed(Cancelled(f"cannot launch {action.count} workers: {error}"))

    def _placed(self, joiners: tuple[int, ...]) -> TargetFixed | Cancelled:
        assert self._machine.attempt is not None
        assert self._wish is not None
        request = self._machine.attempt.request
        source = request.source.rank_map
        if self._wish.replace is not None:
            (fresh,) = joiners
            seats = tuple(fresh if w == self._wish.replace else w for w in source.workers)
            return TargetFixed(RankMap(source.layout, seats))
        kept = self._wish.kept(source)
        if not joiners:
            nodes = {worker: self._registry.node_of(worker) for worker in kept}
            kept = tuple(self._capacity.stayers(nodes, request.target.workers))
        available = (*sorted(kept), *joiners)
        model = self._services.recipe.spec
        try:
            return TargetFixed(self._services.place(model, source, request.target, available))
        except LiverError as error:
            return Cancelled(f"cannot place {request.target}: {error}")

    def _ended(self, ended: Ended) -> None:
        self._last_generation = max(self._last_generation, ended.world.generation)
        self._recorder.attempt_ended(ended)
        if ended.outcome != "completed":
            self._registry.dismiss(ended.generation)
        self._owner.handoff_ended(ended)


def _log_timings(message: OfAttempt) -> None:
    timings_s = getattr(message, "timings_s", {})
    if timings_s:
        took = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in timings_s.items())
        log.info("worker %d %s: %s", message.worker, message.type, took)
