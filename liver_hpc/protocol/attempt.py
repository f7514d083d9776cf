"""What the coordinator knows of the handoff attempt in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from liver_hpc.layout.coordinates import RankMap, ids_text
from liver_hpc.protocol.events import Requested, StateSaved, WorkerLost
from liver_hpc.protocol.messages import ScalarState, Vote


class Phase(StrEnum):
    IDLE = "IDLE"
    BOOT = "BOOT"
    PREPARE = "PREPARE"
    ARMED = "ARMED"
    TRANSFER = "TRANSFER"
    RELEASE = "RELEASE"
    ABORT = "ABORT"


Awaited = tuple[int, type]
"""A worker, and the type of the event that must come from it."""


@dataclass
class Attempt:
    """One attempt. `target` is None while it waits for joiners (BOOT).

    awaited: what the present phase still waits for; scalars: the state that each source worker
    reported at the boundary; planned: to whom each worker is to send state; saved: what
    became of the newest checkpoint, in bounded memory; freed: workers were told that it stands, and
    give the source's memory back; rebuild: the source's groups are gone; reason: why it was
    aborted.
    """

    request: Requested
    joiners: list[int] = field(default_factory=list)
    target: RankMap | None = None
    awaited: set[Awaited] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    scalars: dict[int, ScalarState] = field(default_factory=dict)
    votes: dict[int, Vote] = field(default_factory=dict)
    kept_groups: int = 0
    planned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    saved: StateSaved | None = None
    freed: bool = False
    rebuild: bool = False
    reason: str = ""

    @property
    def generation(self) -> int:
        return self.request.generation

    @property
    def source_workers(self) -> tuple[int, ...]:
        return self.request.source.rank_map.workers

    @property
    def target_workers(self) -> tuple[int, ...]:
        return self.target.workers if self.target is not None else ()

    @property
    def participants(self) -> tuple[int, ...]:
        """The workers that were told to PREPARE: of both worlds, each once, sorted."""
        if self.target is None:
            return ()
        return tuple(sorted({*self.source_workers, *self.target.workers}))

    @property
    def leavers(self) -> tuple[int, ...]:
        return tuple(w for w in self.source_workers if self.leaves(w))

    @property
    def new_workers(self) -> tuple[int, ...]:
        """Those of the target that have no seat in the source."""
        return tuple(w for w in self.target_workers if not self.trains_in_source(w))

    def trains_in_source(self, worker: int) -> bool:
        return worker in self.request.source.rank_map

    def leaves(self, worker: int) -> bool:
        """Whether a worker of the source has no seat in the target."""
        seated = self.target is not None and worker in self.target
        return not seated and self.trains_in_source(worker)

    @property
    def waiting_workers(self) -> tuple[int, ...]:
        """The workers that the present phase still waits for, sorted."""
        return tuple(sorted({worker for worker, _ in self.awaited}))

    def waits_for(self) -> str:
        """Whom the present phase still waits for, and for what."""
        if self.target is None:
            wanted = len(self.request.joiners)
            return f"Hello of {wanted - len(self.joiners)} of {wanted} joiners"
        by_type: dict[str, list[int]] = {}
        for worker, event_type in sorted(self.awaited, key=lambda a: (a[1].__name__, a[0])):
            name = "the end" if event_type is WorkerLost else event_type.__name__
            by_type.setdefault(name, []).append(worker)
        if self.request.bounded and not self.freed and {*by_type} == {Vote.__name__}:
            return "the checkpoint of the boundary"
        return ", ".join(f"{name} of workers {ids_text(late)}" for name, late in by_type.items())
