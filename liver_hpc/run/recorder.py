"""What the coordinator writes down of a run: its steps, and its handoff attempts with all times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from liver_hpc.clock import Clock
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Event, Requested
from liver_hpc.protocol.messages import Evaluated, Progress, StepDone, Transports
from liver_hpc.run.actions import AttemptBegins, Record, RecordAll
from liver_hpc.run.attempt_notes import AttemptNotes
from liver_hpc.run.records import EvaluationRecord, NetworkRecord, ReconfigurationRecord, Row


class RunRecorder:
    """Turns messages into records, and keeps the newest figures for the status snapshot."""

    def __init__(
        self,
        add: Callable[[Record | RecordAll | AttemptBegins], None],
        clock: Clock,
        node_of: Callable[[int], str] = lambda worker: "",
    ) -> None:
        self._add = add
        self._clock = clock
        self._node_of = node_of
        self._generations: set[int] = set()
        # The phase label of steps that began before the last attempt was over, and its end.
        self._wake: tuple[str, float] = ("", -math.inf)
        self.attempt: AttemptNotes | None = None
        self.first_step = 0
        self.last_step: StepDone | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.completed = 0
        self.aborted = 0
        self.failed = 0
        self.transports: dict[int, tuple[str, ...]] = {}
        self._told: dict[int, dict[int, Transports]] = {}

    @property
    def steps_done(self) -> int:
        return self.last_step.step + 1 if self.last_step is not None else self.first_step

    def step_done(self, done: StepDone) -> str:
        """What the step's record has for its phase; see `StepRecord`."""
        self.last_step = done
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

    def evaluated(self, done: Evaluated) -> None:
        self.last_evaluation = EvaluationRecord(
            done.step, done.generation, done.loss, done.batches, done.started_s, done.ended_s
        )
        self._add(Record(self.last_evaluation))

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
            record = NetworkRecord(
                generation=message.generation,
                transport=kind,
                hosts=",".join(sorted({each.host for each in users})),
                detail=" | ".join(sorted({f"{each.host}: {each.detail}" for each in users})),
            )
            self._add(Record(record))

    def attempt_begins(self, request: Requested, notice_s: float) -> None:
        """From here on steps count as disturbed; `notice_s` is when the request was made."""
        self.attempt = AttemptNotes(request, notice_s, began_s=self._clock.now_s())
        self._add(AttemptBegins(request, notice_s))

    def observe(self, event: Event | Progress) -> None:
        """Of the attempt, if there is one."""
        if self.attempt is not None:
            self.attempt.observe(event, self._clock.now_s())

    def entered(self, phase: Phase, target: RankMap | None) -> None:
        if self.attempt is not None:
            self.attempt.entered_s[phase], self.attempt.target = self._clock.now_s(), target

    def attempt_ended(self, ended: Ended) -> ReconfigurationRecord:
        notes, now_s = self.attempt, self._clock.now_s()
        assert notes is not None
        record = notes.record(ended, now_s, self.steps_done, self._node_of)
        self._add(Record(record))
        phases = notes.worker_phases(self._node_of)
        tables: tuple[Sequence[Row], ...] = (notes.traffic(), phases, notes.crossings())
        for rows in filter(None, tables):
            self._add(RecordAll(rows))
        self._wake = ("release" if ended.outcome == "completed" else "prepare", now_s)
        self.completed += ended.outcome == "completed"
        self.aborted += ended.outcome == "aborted"
        self.failed += ended.outcome == "failed"
        if ended.outcome != "completed":
            self._told.pop(ended.generation, None)
        self.attempt = None
        return record
