"""What is noted of one handoff attempt while it runs, and the record that is made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Event, Requested, WorkerLost
from liver_hpc.protocol.messages import (
    AtBoundary,
    FirstStep,
    Hello,
    Prepared,
    Progress,
    Released,
    Vote,
)
from liver_hpc.run.records import ReconfigurationRecord, TrafficRecord


@dataclass
class AttemptNotes:
    """What is noted of one handoff attempt while it runs.

    entered_s: when each phase began. ended_s: when each source worker's last step ended. heard_s:
    when a worker's word came, by type (of a vote: its stage), in the coordinator's time.
    """

    request: Requested
    notice_s: float
    began_s: float
    target: RankMap | None = None
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
            case Prepared():
                self.heard_s[event.type, event.worker] = now_s
                self.prepared.append(event)
            case AtBoundary():
                self.step = event.scalars.step
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
        stayers = [
            m for m in self.released if m.worker in source.rank_map.workers and self._stays(m)
        ]
        completed = ended.outcome == "completed"
        return ReconfigurationRecord(
            generation=self.generation,
            source_generation=source.generation,
            source=str(source.rank_map.layout),
            target=str(self.request.target.layout),
            source_workers=_ids(source.rank_map),
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


def _ids(rank_map: RankMap | None) -> str:
    return ",".join(map(str, rank_map.workers)) if rank_map is not None else ""
