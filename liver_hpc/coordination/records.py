"""What the coordinator writes down of a run: its steps, and its handoff attempts with all times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from liver_hpc.clock import Clock
from liver_hpc.coordination.lanes import worker_phases
from liver_hpc.layout.coordinates import Roster
from liver_hpc.metrics.records import (
    NetworkRecord,
    NoticeRecord,
    ReconfigurationRecord,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Event, Requested, TargetFixed, WorkerLost
from liver_hpc.protocol.messages import (
    AtBoundary,
    FirstStep,
    Hello,
    Prepared,
    Progress,
    Released,
    StepDone,
    Transports,
    Vote,
)


class Metrics(Protocol):
    """Where records go; `error` is empty while they can be written.

    last_generation: the highest that a life of the run before this one recorded; -1 for none.
    """

    error: str
    last_generation: int

    def add_step(self, record: StepRecord) -> None: ...
    def add_reconfiguration(self, record: ReconfigurationRecord) -> None: ...
    def add_notice(self, record: NoticeRecord) -> None: ...
    def add_network(self, record: NetworkRecord) -> None: ...
    def add_worker_phase(self, record: WorkerPhaseRecord) -> None: ...
    def add_traffic(self, record: TrafficRecord) -> None: ...
    def close(self) -> None: ...


@dataclass
class AttemptNotes:
    """What is noted of one handoff attempt while it runs.

    entered_s: when each phase began. ended_s: when each source worker's last step ended. heard_s:
    when a worker's word came, by type (of a vote: its stage), in the coordinator's time.
    """

    request: Requested
    notice_s: float
    began_s: float
    target: Roster | None = None
    entered_s: dict[Phase, float] = field(default_factory=dict)
    step: int = -1
    ended_s: dict[int, float] = field(default_factory=dict)
    heard_s: dict[tuple[str, int], float] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    progress: dict[int, int] = field(default_factory=dict)
    first: dict[int, FirstStep] = field(default_factory=dict)
    released: list[Released] = field(default_factory=list)

    @property
    def generation(self) -> int:
        return self.request.generation

    @property
    def bytes_total(self) -> int:
        """Bytes that all workers together receive."""
        return sum(message.bytes_in for message in self.prepared)

    @property
    def bytes_done(self) -> int:
        return sum(self.progress.values())

    def observe(self, event: Event | Progress, now_s: float) -> None:
        match event:
            case Vote():
                self.heard_s[event.stage, event.worker] = now_s
            case WorkerLost():
                self.heard_s["lost", event.worker] = now_s
            case Hello():
                self.hellos.append(event)
            case TargetFixed():
                self.target = event.target
            case Prepared():
                self.heard_s[event.type, event.worker] = now_s
                self.prepared.append(event)
            case AtBoundary():
                self.step = event.small.step
                self.ended_s[event.worker] = event.last_step_ended_s
            case Progress():
                self.progress[event.worker] = event.bytes_done
            case FirstStep():
                self.first[event.worker] = event
            case Released():
                self.released.append(event)

    def pause_s(self) -> float:
        """The largest of the workers that were in both worlds; of all where none was in both."""
        both = [w for w in self.first if w in self.ended_s]
        if both:
            return max(self.first[w].started_s - self.ended_s[w] for w in both)
        if not self.first or not self.ended_s:
            return math.nan
        return max(f.started_s for f in self.first.values()) - min(self.ended_s.values())

    def record(self, ended: Ended, now_s: float) -> ReconfigurationRecord:
        source = self.request.source
        stayers = [m for m in self.released if m.worker in source.roster.workers and self._stays(m)]
        completed = ended.outcome == "completed"
        return ReconfigurationRecord(
            generation=self.generation,
            source_generation=source.generation,
            source=str(source.roster.layout),
            target=str(self.request.target),
            source_workers=_ids(source.roster),
            target_workers=_ids(self.target),
            notice=self.request.notice,
            outcome=ended.outcome,
            detail=ended.detail,
            step=self.step,
            digest_equal=Phase.RELEASE in self.entered_s,
            bytes_moved=sum(message.bytes_out for message in self.prepared),
            bytes_local=sum(message.bytes_local for message in self.prepared),
            notice_s=self.notice_s,
            boot_ended_s=self._entered_s(Phase.PREPARE),
            prepare_started_s=self._entered_s(Phase.PREPARE),
            prepare_ended_s=self._entered_s(Phase.ARMED),
            armed_s=self._entered_s(Phase.ARMED),
            source_last_step_ended_s=max(self.ended_s.values(), default=math.nan),
            transfer_ended_s=self._entered_s(Phase.COMMIT),
            first_step_started_s=max((f.started_s for f in self.first.values()), default=math.nan),
            committed_s=self._entered_s(Phase.RELEASE),
            first_step_ended_s=max((f.ended_s for f in self.first.values()), default=math.nan),
            released_s=now_s if completed else math.nan,
            pause_s=self.pause_s(),
            stayers_file_descriptors=max((m.file_descriptors for m in stayers), default=0),
            stayers_resident_bytes=max((m.resident_bytes for m in stayers), default=0),
        )

    def _stays(self, message: Released) -> bool:
        return self.target is not None and message.worker in self.target.workers

    def traffic(self) -> list[TrafficRecord]:
        return [
            TrafficRecord(self.generation, message.worker, receiver, num_bytes)
            for message in sorted(self.prepared, key=lambda message: message.worker)
            for receiver, num_bytes in message.bytes_to.items()
        ]

    def _entered_s(self, phase: Phase) -> float:
        return self.entered_s.get(phase, math.nan)


def _ids(roster: Roster | None) -> str:
    return ",".join(map(str, roster.workers)) if roster is not None else ""


class RunRecorder:
    """Turns messages into records, and keeps the newest figures for the status snapshot."""

    def __init__(
        self, metrics: Metrics, clock: Clock, node_of: Callable[[int], str] = lambda worker: ""
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._node_of = node_of
        self._generations: set[int] = set()
        # The phase label of steps that began before the last attempt was over, and its end.
        self._wake: tuple[str, float] = ("", -math.inf)
        self.attempt: AttemptNotes | None = None
        self.last_attempt: ReconfigurationRecord | None = None
        self.first_step = 0
        self.last_step: StepDone | None = None
        self.completed = 0
        self.aborted = 0
        self.transports: dict[int, tuple[str, ...]] = {}
        self._told: dict[int, dict[int, Transports]] = {}

    @property
    def metrics_error(self) -> str:
        return self._metrics.error

    @property
    def steps_done(self) -> int:
        return self.last_step.step + 1 if self.last_step is not None else self.first_step

    def step_done(self, done: StepDone) -> StepRecord:
        record = StepRecord(
            step=done.step,
            generation=done.generation,
            loss=done.loss,
            grad_norm=done.grad_norm,
            learning_rate=done.learning_rate,
            tokens=done.tokens,
            started_s=done.started_s,
            ended_s=done.ended_s,
            phase=self._phase_of(done),
        )
        self._metrics.add_step(record)
        self.last_step = done
        return record

    def _phase_of(self, done: StepDone) -> str:
        if done.generation not in self._generations:
            self._generations.add(done.generation)
            return "first"
        attempt = self.attempt
        if attempt is not None:
            if done.generation == attempt.generation:
                return "release"
            if done.ended_s > attempt.began_s:
                return "prepare"
        label, until_s = self._wake
        return label if done.started_s < until_s else ""

    def connected(self, message: Transports) -> None:
        """A worker says what its collectives use; recorded once all of its world have said so."""
        told = self._told.setdefault(message.generation, {})
        told[message.worker] = message
        if len(told) < message.workers:
            return
        del self._told[message.generation]
        kinds = sorted({kind for each in told.values() for kind in each.kinds})
        self.transports[message.generation] = tuple(kinds)
        for kind in kinds:
            users = [each for each in told.values() if kind in each.kinds]
            self._metrics.add_network(
                NetworkRecord(
                    generation=message.generation,
                    transport=kind,
                    hosts=",".join(sorted({each.host for each in users})),
                    detail=" | ".join(sorted({f"{each.host}: {each.detail}" for each in users})),
                )
            )

    def attempt_begins(self, request: Requested, notice_s: float) -> AttemptNotes:
        """From here on steps count as disturbed; `notice_s` is when the wish was made."""
        self.attempt = AttemptNotes(request, notice_s, began_s=self._clock.now_s())
        return self.attempt

    def attempt_ended(self, ended: Ended) -> None:
        notes, now_s = self.attempt, self._clock.now_s()
        assert notes is not None
        if notes.step < 0:
            notes.step = self.steps_done
        self.last_attempt = notes.record(ended, now_s)
        self._metrics.add_reconfiguration(self.last_attempt)
        for traffic in notes.traffic():
            self._metrics.add_traffic(traffic)
        for phase in worker_phases(notes, self._node_of):
            self._metrics.add_worker_phase(phase)
        self._wake = ("release" if ended.outcome == "completed" else "prepare", now_s)
        self.completed += ended.outcome == "completed"
        self.aborted += ended.outcome != "completed"
        self.attempt = None

    def close(self) -> None:
        self._metrics.close()
