"""One handoff attempt after the other: the machine of `protocol/machine.py`, fed and obeyed."""

from __future__ import annotations

from collections.abc import Callable

from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended, Keep, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Attempt, Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Event,
    Requested,
    StateSaved,
    WorldRef,
)
from liver_hpc.protocol.machine import BEFORE_COMMIT, HandoffMachine
from liver_hpc.protocol.status import HandoffStatus
from liver_hpc.run.nodes import HeldNodes
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.records import ReconfigurationRecord
from liver_hpc.run.requests import ReconfigurationRequest


class Handoffs:
    """The attempt in progress, if there is one, and the number of the last one.

    request: what the attempt in progress, or the last one, is for. generation: the target's, of the
    attempt in progress or of the last one. lingers: whether leavers have snapshots, and stay.
    """

    def __init__(
        self,
        machine: HandoffMachine,
        nodes: HeldNodes,
        recorder: RunRecorder,
        ended: Callable[[Ended, ReconfigurationRecord], None],
        lingers: bool = False,
    ) -> None:
        self.request: ReconfigurationRequest | None = None
        self.generation = 0
        self._machine = machine
        self._agents = nodes.agents
        self._nodes = nodes
        self.recorder = recorder
        self._tell_ended = ended
        self._lingers = lingers

    # ---- what is asked

    @property
    def attempt(self) -> Attempt | None:
        return self._machine.attempt

    @property
    def idle(self) -> bool:
        return self._machine.phase is Phase.IDLE and self.recorder.attempt is None

    @property
    def can_be_cancelled(self) -> bool:
        """Not once the source's memory is being given back."""
        attempt = self._machine.attempt
        freed = attempt is not None and attempt.freed
        return self._machine.phase in BEFORE_COMMIT and not freed

    @property
    def boots(self) -> bool:
        """Whether joiners are waited for."""
        return self._machine.phase is Phase.BOOT

    @property
    def committed_world(self) -> WorldRef | None:
        """The target world while its source is being released, else None."""
        attempt = self._machine.attempt
        if self._machine.phase is not Phase.RELEASE or attempt is None or attempt.target is None:
            return None
        return WorldRef(attempt.generation, attempt.target)

    def describe(self) -> str:
        """The attempt in progress: "generation 4 (ARMED)"; empty when there is none."""
        attempt = self._machine.attempt
        return f"generation {attempt.generation} ({self._machine.phase})" if attempt else ""

    @property
    def limit_s(self) -> float:
        """The longest that the present phase of an attempt may take; 0 where there is none."""
        deadline = self._machine.deadline
        return 0.0 if deadline is None else deadline.limit_s

    def identity(self) -> str:
        """The attempt in progress, for the log: "gen 4 TRANSFER"; empty when there is none."""
        attempt = self._machine.attempt
        return f"gen {attempt.generation} {self._machine.phase}" if attempt else ""

    def involves(self, worker: int) -> bool:
        """Whether the attempt in progress knows this worker."""
        attempt = self._machine.attempt
        return attempt is not None and worker in (*attempt.source_workers, *attempt.joiners)

    def status(self) -> HandoffStatus | None:
        attempt, notes = self._machine.attempt, self.recorder.attempt
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

    # ---- what happens

    def start(
        self,
        request: ReconfigurationRequest,
        world: WorldRef,
        target: RankMap,
        bounded: bool = False,
        steps_s: float = 0.0,
    ) -> None:
        """Begins a handoff away from `world`; must be idle. `target` has kept joiners, and others
        under the ids that were to come next, which they may turn out not to have. steps_s: see
        `Requested`."""
        self.request = request
        self.generation += 1
        here = tuple(worker for worker in sorted(target.workers) if worker in self._agents.kept)
        self._agents.take(here)
        lingers = self._lingers and target.layout.workers > 1
        requested = Requested(
            *(self.generation, world, target, str(request), bounded, here, lingers, steps_s)
        )
        self.recorder.attempt_begins(requested, request.made_s)
        self.feed(requested)

    def joined(self, hello: m.Hello, generation: int) -> None:
        """A joiner that was launched for the attempt of `generation` has booted."""
        attempt = self._machine.attempt
        if self._machine.phase is Phase.BOOT and attempt and attempt.generation == generation:
            self.feed(hello)
        else:
            gone = m.Exit(reason=f"the handoff to generation {generation} has ended")
            self._agents.send((hello.worker,), gone)

    def message(self, message: m.OfAttempt) -> None:
        """A worker's message; one of an attempt that has ended is ignored."""
        attempt = self._machine.attempt
        if attempt is not None and message.generation == attempt.generation:
            self.feed(message)

    def progress(self, message: m.Progress) -> None:
        """How far a transfer has come; for the status alone."""
        notes = self.recorder.attempt
        if notes is not None and message.generation == notes.generation:
            self.recorder.observe(message)

    def saved(self, step: int, problem: str = "") -> None:
        """A checkpoint was written, or given up; nothing to an attempt that waits for none."""
        attempt = self._machine.attempt
        bounded = attempt is not None and attempt.request.bounded
        if bounded and self._machine.phase in (Phase.ARMED, Phase.TRANSFER):
            self.feed(StateSaved(step, problem))

    def cancel(self, reason: str) -> None:
        self.feed(Cancelled(reason))

    def cancel_boot(self, reason: str) -> None:
        """Joiners cannot come any more; nothing to an attempt that has them all."""
        if self.boots:
            self.feed(Cancelled(reason))

    def tick(self) -> None:
        """A deadline may have passed."""
        deadline = self._machine.deadline
        if deadline is not None and deadline.expired():
            self.feed(DeadlinePassed())

    # ---- the machine and its actions

    def feed(self, event: Event) -> None:
        """Handles an event, and performs what the machine asks for."""
        before = self._machine.phase
        self.recorder.observe(event)
        actions = self._machine.handle(event)
        attempt = self._machine.attempt
        if self._machine.phase is not before and attempt is not None:
            self.recorder.entered(self._machine.phase, attempt.target)
        for action in actions:
            match action:
                case LaunchJoiners():  # nothing else with it
                    self._launch(action)
                case Send():
                    self._agents.send(action.workers, action.message)
                case Keep():
                    self._agents.keep(action.joiners, action.aborting)
                case Ended():
                    self._ended(action)

    def _launch(self, action: LaunchJoiners) -> None:
        try:
            seats = self._nodes.seats(action.count)
        except LiverError as error:
            self.cancel(f"cannot launch {action.count} workers: {error}")
        else:
            self._agents.launch(action.generation, action.layout, seats)

    def _ended(self, ended: Ended) -> None:
        self.generation = max(self.generation, ended.world.generation)
        record = self.recorder.attempt_ended(ended)
        if ended.outcome != "completed":
            reason = f"the handoff to generation {ended.generation} is off"
            self._agents.dismiss(ended.generation, reason)
        self._tell_ended(ended, record)
