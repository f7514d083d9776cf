"""What each worker of a handoff attempt did when: who waited for whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from liver_hpc.protocol.attempt import Phase
from liver_hpc.run.attempt_notes import AttemptNotes
from liver_hpc.run.records import WorkerPhaseRecord

SHARED_PARTS = ("connect", "staging")
"""The parts of PREPARE that begin once everybody has come as far."""

Span = tuple[str, float, float]
"""A phase, its start and its end in epoch seconds."""


def worker_phases(notes: AttemptNotes, node_of: Callable[[int], str]) -> list[WorkerPhaseRecord]:
    """The phases of an attempt that is over, by worker and in order of time.

    A phase that a worker began and never ended has a NaN for its end.
    """
    source = notes.request.source.rank_map.workers
    target = notes.target.workers if notes.target is not None else ()
    joiners = [hello.worker for hello in notes.hellos]
    return [
        WorkerPhaseRecord(notes.generation, worker, node_of(worker), *span)
        for worker in sorted({*source, *target, *joiners})
        for span in _spans(notes, worker)
    ]


def _spans(notes: AttemptNotes, worker: int) -> Iterator[Span]:
    yield from _boot(notes, worker)
    if notes.target is None:
        return
    yield from _prepare(notes, worker)
    yield from _cross(notes, worker)


def _boot(notes: AttemptNotes, worker: int) -> Iterator[Span]:
    for hello in notes.hellos:
        if hello.worker == worker:
            yield "boot", hello.booted_s - sum(hello.boot_timings_s.values()), hello.booted_s


def _prepare(notes: AttemptNotes, worker: int) -> Iterator[Span]:
    began_s = notes.entered_s[Phase.PREPARE]
    ended_s = notes.heard_s.get(("prepared", worker), math.nan)
    if math.isnan(ended_s):
        yield "prepare", began_s, math.nan
        return
    (message,) = (each for each in notes.prepared if each.worker == worker)
    shared_s = sum(message.timings_s.get(part, 0.0) for part in SHARED_PARTS)
    alone_until_s = max(began_s, ended_s - shared_s)
    yield "prepare", began_s, alone_until_s
    yield "connect", alone_until_s, ended_s


def _cross(notes: AttemptNotes, worker: int) -> Iterator[Span]:
    """From the boundary on. What comes from the source moves once its last worker stands there."""
    if not notes.ended_s:
        return
    moving_s = notes.ended_s.get(worker, max(notes.ended_s.values()))
    yield "transfer", moving_s, notes.heard_s.get(("parameters", worker), math.nan)
    if Phase.COMMIT not in notes.entered_s:
        return
    first = notes.first.get(worker)
    began_s = first.started_s if first is not None else notes.entered_s[Phase.COMMIT]
    yield "first step", began_s, notes.heard_s.get(("optimizer", worker), math.nan)
    if Phase.RELEASE not in notes.entered_s:
        return
    committed_s = notes.entered_s[Phase.RELEASE]
    if first is not None:
        yield "update", committed_s, first.ended_s
    gone_s = notes.heard_s.get(("lost", worker), math.nan)
    released_s = next((m.released_s for m in notes.released if m.worker == worker), gone_s)
    yield "release", first.ended_s if first is not None else committed_s, released_s
