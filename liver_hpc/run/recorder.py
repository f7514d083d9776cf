"""What the coordinator writes down of a run: its steps, and its handoff attempts with all times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from liver_hpc.clock import Clock
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import Requested
from liver_hpc.protocol.messages import (
    StepDone,
    Transports,
)
from liver_hpc.run.attempt_notes import AttemptNotes
from liver_hpc.run.lanes import worker_phases
from liver_hpc.run.records import (
    NetworkRecord,
    NoticeRecord,
    ReconfigurationRecord,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)


class Metrics(Protocol):
    """Where records go; `error` is empty while they can be written.

    last_generation: the highest that a life of the run before this one recorded; -1 for none.
    """

    last_generation: int

    @property
    def error(self) -> str: ...
    def add_step(self, record: StepRecord) -> None: ...
    def add_reconfiguration(self, record: ReconfigurationRecord) -> None: ...
    def add_notice(self, record: NoticeRecord) -> None: ...
    def add_network(self, record: NetworkRecord) -> None: ...
    def add_worker_phase(self, record: WorkerPhaseRecord) -> None: ...
    def add_traffic(self, record: TrafficRecord) -> None: ...
    def close(self) -> None: ...


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
