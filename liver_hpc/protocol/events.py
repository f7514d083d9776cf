"""What happens to a handoff: the workers' messages, and these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m


@dataclass(frozen=True)
class WorldRef:
    """A world as the coordinator knows it: its generation, and who sits where."""

    generation: int
    rank_map: RankMap

    def __str__(self) -> str:
        return f"generation {self.generation}, {self.rank_map}"


@dataclass(frozen=True)
class Requested:
    """A handoff is wanted. `target` has joiners under ids that they may turn out not to have.

    `generation` is the target's; the number after it is free too, for a rebuild of the source.
    """

    generation: int
    source: WorldRef
    target: RankMap
    notice: str

    @cached_property
    def joiners(self) -> tuple[int, ...]:
        """The workers of `target` that have to be launched, sorted."""
        return tuple(sorted({*self.target.workers} - {*self.source.rank_map.workers}))

    def target_with(self, joiners: list[int]) -> RankMap:
        """The target with the ids that the joiners really have."""
        ids = dict(zip(self.joiners, sorted(joiners), strict=True))
        workers = tuple(ids.get(worker, worker) for worker in self.target.workers)
        return RankMap(self.target.layout, workers)


@dataclass(frozen=True)
class WorkerLost:
    """The worker's process or its connection has gone, wanted or not."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Cancelled:
    """The handoff is no longer wanted, or cannot go on for a reason that lies with no worker."""

    reason: str


@dataclass(frozen=True)
class DeadlinePassed:
    """`HandoffMachine.deadline` has expired."""


FromParticipant = m.Hello | m.OfAttempt | m.Finished
Event = FromParticipant | Requested | WorkerLost | Cancelled | DeadlinePassed
