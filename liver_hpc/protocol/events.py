"""What happens to a handoff: the workers' messages, and these."""

from __future__ import annotations

from dataclasses import dataclass

from liver_hpc.layout.coordinates import Layout, RankMap
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
    """A handoff is wanted; `joiners` workers have to be launched for it.

    `generation` is the target's; the number after it is free too, for a rebuild of the source.
    """

    generation: int
    source: WorldRef
    target: Layout
    joiners: int
    notice: str


@dataclass(frozen=True)
class TargetFixed:
    """The answer to `PlaceTarget`: who sits where in the target world."""

    target: RankMap


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


FromParticipant = (
    m.Hello
    | m.Prepared
    | m.AtBoundary
    | m.Vote
    | m.FirstStep
    | m.Released
    | m.Aborted
    | m.Failed
    | m.Finished
)
Event = FromParticipant | Requested | TargetFixed | WorkerLost | Cancelled | DeadlinePassed
