"""One handoff attempt after the other: the machine of `protocol/machine.py`, fed and obeyed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.clock import Clock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.actions import Action, Ended, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Attempt, Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Event,
    Requested,
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
from liver_hpc.run.agents import Agents
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.requests import ReconfigurationRequest

OfAttempt = Prepared | AtBoundary | Vote | FirstStep | Released | Aborted | Failed
"""Messages that belong to the handoff attempt of their generation."""


@dataclass(frozen=True)
class Owner:
    """Who is told how handoffs end."""

    ended: Callable[[Ended], None]
    run_failed: Callable[[str], None]


class Handoffs:
    """The attempt in progress, if there is one, and the number of the last one.

    request: what the attempt in progress, or the last one, is for. generation: the target's, of the
    attempt in progress or of the last one.
    """

    def __init__(
        self,
        deadlines: DeadlineSection,
        clock: Clock,
        agents: Agents,
        nodes: HeldNodes,
        recorder: RunRecorder,
        owner: Owner,
    ) -> None:
        self.request: ReconfigurationRequest | None = None
        self.generation = 0
        self._clock = clock
        self._agents = agents
        self._nodes = nodes
        self._recorder = recorder
        self._owner = owner
        self._machine = HandoffMachine(deadlines, clock)
        self._events: deque[Event] = deque()
        self._busy = False

    # ---- what is asked

    @property
    def attempt(self) -> Attempt | None:
        return self._machine.attempt

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

    def target_workers(self) -> tuple[int, ...] | None:
        """Who will train after the attempt in progress; None while that is not decided."""
        attempt = self._machine.attempt
        return None if attempt is None or attempt.target is None else attempt.target.workers

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
        return attempt is not None and worker in (*attempt.source_workers, *attempt.joiners)

    def status(self) -> HandoffStatus | None:
        attempt, notes = self._machine.attempt, self._recorder.attempt
        if attempt is None or notes is None:
            return None
        return HandoffStatus(
            generation=attempt.generation,
            phase=str(self._machine.phase),
            source=str(attempt.request.source.rank_map.layout),
            target=str(attempt.request.target.layout),
            notice=attempt.request.notice,
            since_s=notes.entered_s.get(self._machine.phase, notes.began_s),
            bytes_done=notes.bytes_done,
            bytes_total=notes.bytes_total,
            waiting_for=attempt.waiting_workers,
        )

    def check(self) -> None:
        """Asserts what must hold between any two events."""
        assert (self._machine.attempt is None) == (self._recorder.attempt is None)
        assert not self._events
        assert not self._busy

    # ---- what happens

    def start(self, request: ReconfigurationRequest, world: WorldRef, target: RankMap) -> None:
        """Begins a handoff away from `world`; must be idle. `target` has joiners under the ids that
        were to come next, which they may turn out not to have."""
        self.request = request
        self.generation += 1
        requested = Requested(self.generation, world, target, str(request))
        self._recorder.attempt_begins(requested, request.made_s)
        self._feed(requested)

    def joined(self, hello: Hello, generation: int) -> None:
        """A joiner that was launched for the attempt of `generation` has booted."""
        attempt = self._machine.attempt
        if self._machine.phase is Phase.BOOT and attempt and attempt.generation == generation:
            self._feed(hello)
        else:
            gone = Exit(reason=f"the handoff to generation {generation} has ended")
            self._agents.send((hello.worker,), gone)

    def message(self, message: OfAttempt) -> None:
        """A worker's message; one of an attempt that has ended is ignored."""
        attempt = self._machine.attempt
        if attempt is not None and message.generation == attempt.generation:
            self._feed(message)

    def progress(self, message: Progress) -> None:
        """How far a transfer has come; for the status alone."""
        notes = self._recorder.attempt
        if notes is not None and message.generation == notes.generation:
            notes.observe(message, self._clock.now_s())

    def finished(self, message: Finished) -> None:
        self._feed(message)

    def lost(self, worker: int, reason: str) -> None:
        """A worker of the attempt or of the world has gone."""
        if self._machine.phase is Phase.IDLE:
            self._owner.run_failed(f"worker {worker} lost: {reason}")
        else:
            self._feed(WorkerLost(worker, reason))

    def cancel(self, reason: str) -> None:
        self._feed(Cancelled(reason))

    def cancel_boot(self, reason: str) -> None:
        """Joiners cannot come any more; nothing to an attempt that has them all."""
        if self._machine.phase is Phase.BOOT:
            self._feed(Cancelled(reason))

    def tick(self) -> None:
        """A deadline may have passed."""
        deadline = self._machine.deadline
        if deadline is not None and deadline.expired():
            self._feed(DeadlinePassed())

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
            self._events.clear()

    def _handle(self, event: Event) -> None:
        before = self._machine.phase
        if self._recorder.attempt is not None:
            self._recorder.attempt.observe(event, self._clock.now_s())
        actions = self._machine.handle(event)
        attempt, notes, phase = self._machine.attempt, self._recorder.attempt, self._machine.phase
        if phase is not before and attempt is not None and notes is not None:
            notes.entered_s[phase], notes.target = self._clock.now_s(), attempt.target
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case LaunchJoiners():
                self._launch(action)
            case Send():
                self._agents.send(action.workers, action.message)
            case Ended():
                self._ended(action)

    def _launch(self, action: LaunchJoiners) -> None:
        try:
            seats = self._nodes.seats(action.count, self._agents.taken())
        except LiverError as error:
            self._feed(Cancelled(f"cannot launch {action.count} workers: {error}"))
        else:
            self._agents.launch(action.generation, action.layout, seats)

    def _ended(self, ended: Ended) -> None:
        self.generation = max(self.generation, ended.world.generation)
        self._recorder.attempt_ended(ended)
        if ended.outcome != "completed":
            self._agents.dismiss(ended.generation)
        self._owner.ended(ended)
        if ended.outcome == "failed":
            self._owner.run_failed(f"handoff to generation {ended.generation}, {ended.detail}")
