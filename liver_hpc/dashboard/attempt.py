"""The handoff attempt in progress, by the journal: which phase it is in, and what each worker does.

What is noted of it is noted as the coordinator does (`AttemptNotes`), so its lanes are those that
the report draws once it is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import WorkerLost
from liver_hpc.run.actions import AttemptBegins
from liver_hpc.run.attempt_notes import AttemptNotes, Span
from liver_hpc.run.codec import ATTEMPT_BEGINS, decode_attempt, decode_event
from liver_hpc.run.entries import COORDINATOR_STARTED, Entry
from liver_hpc.run.events import NodeGone, SaidTogether, WorkerGone
from liver_hpc.run.records import WorkerPhaseRecord

HEARD = (
    "hello", "prepared", "at_boundary", "vote", "first_step", "released", "aborted",
    "said_together", "worker_gone", "node_gone",
)  # fmt: skip
"""The events that tell of an attempt; training steps, of which there are most, do not."""
TOLD = {
    "prepare": Phase.PREPARE,
    "arm": Phase.ARMED,
    "verdict": Phase.RELEASE,
    "abort": Phase.ABORT,
}
"""The phase that begins when workers are told so."""


class LiveAttempt:
    """bytes_told: how many have come, as a coordinator told; the journal does not have that."""

    def __init__(self, begins: AttemptBegins, at_s: float) -> None:
        self.notes = AttemptNotes(begins.requested, begins.notice_s, began_s=at_s)
        self.phase = Phase.BOOT
        self.bytes_told = 0

    # ---- what happens

    def heard(self, event: dict[str, Any], at_s: float, node_of: Callable[[int], str]) -> None:
        """An event of HEARD."""
        known = decode_event(event)
        if isinstance(known, NodeGone):
            self._node_gone(known, at_s, node_of)
            return
        for each in known.messages if isinstance(known, SaidTogether) else (known,):
            if isinstance(each, WorkerGone):
                self.notes.observe(WorkerLost(each.worker, each.reason), at_s)
            elif isinstance(each, m.Hello) or (
                isinstance(each, m.OfAttempt) and each.generation == self.notes.generation
            ):
                self.notes.observe(each, at_s)
                if self.phase is Phase.ARMED and isinstance(each, m.AtBoundary | m.Vote):
                    self._enter(Phase.TRANSFER, at_s)

    def _node_gone(self, event: NodeGone, at_s: float, node_of: Callable[[int], str]) -> None:
        """Workers go with it that had come, and were not gone yet."""
        came = {*self.notes.request.source.rank_map.workers, *self.notes.request.here}
        came |= self.notes.said(m.Hello).keys()
        for worker in sorted(came - self.notes.said(WorkerLost).keys()):
            if node_of(worker) == event.node:
                reason = f"its node {event.node} is gone: {event.reason}"
                self.notes.observe(WorkerLost(worker, reason), at_s)

    def told(self, message: Mapping[str, Any], at_s: float) -> None:
        """What workers are told."""
        phase = TOLD.get(message["type"])
        if phase is None or message["generation"] != self.notes.generation:
            return
        if phase is Phase.PREPARE:
            self.notes.target = m.WireRankMap.model_validate(message["target"]).rank_map()
        self._enter(phase, at_s)

    def _enter(self, phase: Phase, at_s: float) -> None:
        self.phase = phase
        self.notes.entered_s.setdefault(phase, at_s)

    # ---- how it stands

    @property
    def moves(self) -> bool:
        """Whether state is on its way, or about to be."""
        return self.phase in (Phase.ARMED, Phase.TRANSFER)

    @property
    def boundary_s(self) -> float:
        """When the last of the source's workers that stand at the boundary came there; NaN before
        the first."""
        stand = self.notes.said(m.AtBoundary).values()
        return max((each.last_step_ended_s for each in stand), default=math.nan)

    @property
    def bytes_done(self) -> int:
        """At least those of the workers that have voted, which have all that they wait for."""
        prepared = self.notes.said(m.Prepared)
        voted = [prepared[worker] for worker in self.notes.said(m.Vote) if worker in prepared]
        there = sum(each.bytes_in + each.bytes_local for each in voted)
        return max(self.bytes_told, there)

    @property
    def workers(self) -> tuple[int, ...]:
        """Of both worlds; the joiners' ids are those that they will have, in all likelihood."""
        target = self.notes.target or self.notes.request.target
        return tuple(sorted({*self.notes.request.source.rank_map.workers, *target.workers}))

    def waits_for(self) -> tuple[int, ...]:
        """The workers whose word the present phase still waits for."""
        notes, source = self.notes, self.notes.request.source.rank_map.workers
        target = notes.target.workers if notes.target is not None else ()
        awaited: dict[Phase, tuple[type, tuple[int, ...]]] = {
            Phase.BOOT: (m.Hello, tuple({*self.workers} - {*source, *notes.request.here})),
            Phase.PREPARE: (m.Prepared, self.workers),
            Phase.ARMED: (m.AtBoundary, source),
            Phase.TRANSFER: (m.Vote, self.workers),
            Phase.RELEASE: (m.Released, target),
            Phase.ABORT: (m.Aborted, self.workers),
        }
        kind, workers = awaited[self.phase]
        said: Mapping[int, Any] = notes.said(kind)
        return tuple(sorted(worker for worker in workers if worker not in said))

    def phases(self) -> Iterator[Span]:
        """Each phase with its begin and its end; NaN while it goes on. COMMIT begins with the first
        vote, BOUNDARY is the wait for it."""
        entered_s = self.notes.entered_s
        votes_s = [self.notes.heard_s[m.Vote, worker] for worker in self.notes.said(m.Vote)]
        edges = [
            ("BOOT", self.notes.began_s),
            ("PREPARE", entered_s.get(Phase.PREPARE, math.nan)),
            ("BOUNDARY", entered_s.get(Phase.ARMED, math.nan)),
            ("TRANSFER", entered_s.get(Phase.TRANSFER, math.nan)),
            ("COMMIT", min(votes_s, default=math.nan)),
            ("RELEASE", entered_s.get(Phase.RELEASE, math.nan)),
            ("ABORT", entered_s.get(Phase.ABORT, math.nan)),
        ]
        begun = [edge for edge in edges if math.isfinite(edge[1])]
        ends_s = [*(at_s for _, at_s in begun[1:]), math.nan]
        yield from ((name, at_s, end_s) for (name, at_s), end_s in zip(begun, ends_s, strict=True))

    def lanes(self, node_of: Callable[[int], str]) -> list[WorkerPhaseRecord]:
        """What each worker has done and does, as it is recorded in the end; of a joiner that has
        not come yet, that it boots."""
        notes = self.notes
        known = notes.worker_phases(node_of)
        if self.phase is not Phase.BOOT:
            return known
        began_s, generation = notes.began_s, notes.generation
        return [
            *known,
            *(
                WorkerPhaseRecord(generation, worker, node_of(worker), "boot", began_s, math.nan)
                for worker in self.waits_for()
            ),
        ]


def follow_attempt(
    attempt: LiveAttempt | None, entry: Entry, node_of: Callable[[int], str]
) -> LiveAttempt | None:
    """The attempt in progress after another entry; None where there is none."""
    if attempt is not None and entry.event["type"] in HEARD:
        attempt.heard(entry.event, entry.at_s, node_of)
    elif entry.event["type"] == COORDINATOR_STARTED:
        attempt = None  # that of a coordinator which was killed, and the run with it
    for action in entry.actions:
        kind = action["type"]
        if kind == ATTEMPT_BEGINS:
            attempt = LiveAttempt(decode_attempt(action), entry.at_s)
        elif kind == "end" or (kind == "record" and action["table"] == "reconfigurations"):
            attempt = None
        elif attempt is not None and kind == "send":
            attempt.told(action["message"], entry.at_s)
    return attempt
