"""What is noted of one handoff attempt while it runs, and the records that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Event, Requested, StateSaved, WorkerLost
from liver_hpc.run.records import (
    CrossingRecord,
    ReconfigurationRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)

SHARED_PARTS = ("connect", "staging")
"""The parts of PREPARE that begin once everybody has come as far."""

PACKING = ("pack", "unpack", "copy")
"""What a transport calls the work at either end of a message, or instead of one."""

Kind = TypeVar("Kind")
Span = tuple[str, float, float]
"""A phase, its start and its end in epoch seconds."""


@dataclass
class AttemptNotes:
    """What is noted of one handoff attempt while it runs.

    entered_s: when each phase began. heard_s: when a worker's word came, by type, in the
    coordinator's time. saved_s: when checkpoints stood, by their step, in bounded memory.
    """

    request: Requested
    notice_s: float
    began_s: float
    target: RankMap | None = None
    entered_s: dict[Phase, float] = field(default_factory=dict)
    heard_s: dict[tuple[type, int], float] = field(default_factory=dict)
    saved_s: dict[int, float] = field(default_factory=dict)
    _said: dict[type, dict[int, Any]] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        return self.request.generation

    @property
    def bytes_total(self) -> int:
        """Bytes that all workers together receive, or copy within their memory: Progress counts
        both."""
        prepared = self.said(m.Prepared).values()
        return sum(message.bytes_in + message.bytes_local for message in prepared)

    @property
    def bytes_done(self) -> int:
        return sum(message.bytes_done for message in self.said(m.Progress).values())

    def observe(self, event: Event | m.Progress, now_s: float) -> None:
        if isinstance(event, StateSaved) and not event.problem:
            self.saved_s[event.step] = now_s
        worker = getattr(event, "worker", None)
        if worker is not None:
            self._said.setdefault(type(event), {})[worker] = event
            self.heard_s[type(event), worker] = now_s

    def said(self, kind: type[Kind]) -> dict[int, Kind]:
        """Each worker's newest message of a kind."""
        return self._said.get(kind, {})

    def pause_s(self) -> float:
        """The largest of the workers that were in both worlds; of all where none was in both."""
        first, ended_s = self.said(m.FirstStep), self._ended_s()
        both = [w for w in first if w in ended_s]
        if both:
            return max(first[w].started_s - ended_s[w] for w in both)
        if not first or not ended_s:
            return math.nan
        return max(f.started_s for f in first.values()) - min(ended_s.values())

    # ---- once it is over

    def record(
        self, ended: Ended, now_s: float, steps_done: int, node_of: Callable[[int], str]
    ) -> ReconfigurationRecord:
        """steps_done: where the source stood, for an attempt that has not come to a boundary."""
        source = self.request.source
        at_boundary = [*self.said(m.AtBoundary).values()]
        prepared, first = self.said(m.Prepared).values(), self.said(m.FirstStep).values()
        step = at_boundary[-1].scalars.step if at_boundary else steps_done
        stayers = [each for each in self.said(m.Released).values() if self._stays(each.worker)]
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
            step=step,
            digest_equal=Phase.RELEASE in self.entered_s,
            bytes_moved=sum(message.bytes_out for message in prepared),
            bytes_local=sum(message.bytes_local for message in prepared),
            notice_s=self.notice_s,
            began_s=self.began_s,
            boot_ended_s=self._entered_s(Phase.PREPARE),
            prepare_started_s=self._entered_s(Phase.PREPARE),
            prepare_ended_s=self._entered_s(Phase.ARMED),
            armed_s=self._entered_s(Phase.ARMED),
            source_last_step_ended_s=max(self._ended_s().values(), default=math.nan),
            transfer_ended_s=self._transfer_ended_s(),
            first_step_started_s=max((f.started_s for f in first), default=math.nan),
            committed_s=self._entered_s(Phase.RELEASE),
            first_step_ended_s=max((f.ended_s for f in first), default=math.nan),
            released_s=now_s if ended.outcome == "completed" else math.nan,
            pause_s=self.pause_s(),
            stayers_file_descriptors=max((each.file_descriptors for each in stayers), default=0),
            stayers_resident_bytes=max((each.resident_bytes for each in stayers), default=0),
            bytes_between_nodes=self._bytes_between(node_of),
            checkpointed_s=self.saved_s.get(step, math.nan),
            spares=len(self.request.here),
        )

    def _bytes_between(self, node_of: Callable[[int], str]) -> int:
        """Bytes that go to another node."""
        sent, total = self.said(m.Prepared), 0
        nodes = {worker: node_of(worker) for worker in {*sent, *self.target_workers}}
        for worker, message in sent.items():
            node = nodes[worker]
            total += sum(num for to, num in message.bytes_to.items() if nodes[to] != node)
        return total

    @property
    def target_workers(self) -> tuple[int, ...]:
        return self.target.workers if self.target is not None else ()

    def traffic(self) -> list[TrafficRecord]:
        """Who sends how much to whom. By sender."""
        return [
            TrafficRecord(self.generation, worker, receiver, num_bytes)
            for worker, message in sorted(self.said(m.Prepared).items())
            for receiver, num_bytes in message.bytes_to.items()
        ]

    def crossings(self) -> list[CrossingRecord]:
        """Where the time of each worker that voted went. By worker."""
        first = self.said(m.FirstStep)
        return [
            self._crossing(vote, first.get(worker))
            for worker, vote in sorted(self.said(m.Vote).items())
            if vote.started_s is not None
        ]

    def _crossing(self, vote: m.Vote, first: m.FirstStep | None) -> CrossingRecord:
        spent_s, started_s = vote.timings_s, vote.started_s
        assert started_s is not None
        computed_s, after_s = (
            spent_s.get(name, 0.0) for name in ("forward_backward", "optimizer_after")
        )
        then_s = first.timings_s if first is not None else {}
        return CrossingRecord(
            generation=self.generation,
            worker=vote.worker,
            parameter_wire_s=_spent_s(spent_s, "parameters", "wire"),
            parameter_pack_s=_spent_s(spent_s, "parameters", *PACKING),
            parameter_digest_s=_spent_s(spent_s, "parameters", "digest"),
            started_s=started_s,
            forward_backward_s=computed_s,
            optimizer_wire_s=_spent_s(spent_s, "optimizer", "wire"),
            optimizer_pack_s=_spent_s(spent_s, "optimizer", *PACKING),
            optimizer_digest_s=_spent_s(spent_s, "optimizer", "digest"),
            optimizer_after_s=after_s,
            voted_s=started_s + computed_s + after_s,
            verdict_s=then_s.get("verdict", math.nan),
            update_s=then_s.get("update", math.nan),
            ended_s=first.ended_s if first is not None else math.nan,
        )

    def worker_phases(self, node_of: Callable[[int], str]) -> list[WorkerPhaseRecord]:
        """What each worker did when: who waited for whom. By worker and in order of time.

        A phase that a worker began and never ended has a NaN for its end.
        """
        source = self.request.source.rank_map.workers
        target = self.target_workers
        ended_s = self._ended_s()
        last_ended_s = max(ended_s.values(), default=math.nan)
        return [
            WorkerPhaseRecord(self.generation, worker, node, *span)
            for worker in sorted({*source, *target, *self.said(m.Hello)})
            for node in (node_of(worker),)
            for span in self._spans(worker, ended_s, last_ended_s)
        ]

    def _spans(
        self, worker: int, source_ended_s: Mapping[int, float], last_ended_s: float
    ) -> Iterator[Span]:
        hello = self.said(m.Hello).get(worker)
        if hello is not None:
            yield "boot", hello.booted_s - sum(hello.boot_timings_s.values()), hello.booted_s
        if self.target is not None:
            yield from self._prepare(worker)
            yield from self._cross(worker, source_ended_s, last_ended_s)

    def _prepare(self, worker: int) -> Iterator[Span]:
        began_s, message = self.entered_s[Phase.PREPARE], self.said(m.Prepared).get(worker)
        if message is None:
            yield "prepare", began_s, math.nan
            return
        ended_s = self.heard_s[m.Prepared, worker]
        shared_s = sum(message.timings_s.get(part, 0.0) for part in SHARED_PARTS)
        alone_until_s = max(began_s, ended_s - shared_s)
        yield "prepare", began_s, alone_until_s
        yield "connect", alone_until_s, ended_s

    def _cross(
        self, worker: int, source_ended_s: Mapping[int, float], last_ended_s: float
    ) -> Iterator[Span]:
        """From the boundary on; to a joiner nothing moves before the last worker stands there."""
        if not source_ended_s:
            return
        moving_s = source_ended_s.get(worker, last_ended_s)
        vote, first = self.said(m.Vote).get(worker), self.said(m.FirstStep).get(worker)
        began_s = vote.started_s if vote is not None else None
        yield "transfer", moving_s, math.nan if began_s is None else began_s
        if began_s is None:
            return
        yield "first step", began_s, self.heard_s[m.Vote, worker]
        if Phase.RELEASE not in self.entered_s:
            return
        committed_s = self.entered_s[Phase.RELEASE]
        if first is not None:
            yield "update", committed_s, first.ended_s
        released = self.said(m.Released).get(worker)
        gone_s = self.heard_s.get((WorkerLost, worker), math.nan)
        released_s = released.released_s if released is not None else gone_s
        yield "release", first.ended_s if first is not None else committed_s, released_s

    # ---- parts

    def _transfer_ended_s(self) -> float:
        """When the last worker had its parameters; NaN where one never had."""
        began_s = [vote.started_s for vote in self.said(m.Vote).values()]
        known_s = [each for each in began_s if each is not None]
        return max(known_s) if known_s and len(known_s) == len(began_s) else math.nan

    def _ended_s(self) -> dict[int, float]:
        """When the last step of each worker of the source ended."""
        return {w: message.last_step_ended_s for w, message in self.said(m.AtBoundary).items()}

    def _stays(self, worker: int) -> bool:
        both = (self.request.source.rank_map, self.target)
        return all(world is not None and worker in world for world in both)

    def _entered_s(self, phase: Phase) -> float:
        return self.entered_s.get(phase, math.nan)


def _spent_s(spent_s: Mapping[str, float], half: str, *parts: str) -> float:
    """Seconds of some parts of a half of TRANSFER; NaN where it told of none."""
    told = [spent_s[name] for part in parts if (name := f"{half}/{part}") in spent_s]
    return sum(told) if told else math.nan


def _ids(rank_map: RankMap | None) -> str:
    return ",".join(map(str, rank_map.workers)) if rank_map is not None else ""
