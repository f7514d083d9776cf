"""What happens to a handoff: the workers' messages, and these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from liver_hpc.layout.coordinates import RankMap, alone
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
    bounded: no worker is to hold both worlds; the way back is a checkpoint of the boundary.
    here: those of the joiners that have booted already. lingers: leavers are not told to
    exit. steps_s: what the steps may take that lie within it, see `DeadlineSection.beside_steps`.
    """

    generation: int
    source: WorldRef
    target: RankMap
    notice: str
    bounded: bool = False
    here: tuple[int, ...] = ()
    lingers: bool = False
    steps_s: float = 0.0

    @cached_property
    def joiners(self) -> tuple[int, ...]:
        """The workers of `target` that do not train in the source, sorted."""
        return tuple(sorted({*self.target.workers} - {*self.source.rank_map.workers}))

    def target_with(self, joiners: Iterable[int], nodes: Mapping[int, int]) -> RankMap:
        """The target with the ids that the joiners really have, each on the node that its seat was
        meant for, if one came there. nodes: those of the joiners, where they are known."""
        target, came = self.target, sorted(joiners)
        on = {worker: nodes.get(worker, alone(worker)) for worker in came}
        there: dict[int, deque[int]] = {}
        for worker in came:
            there.setdefault(on[worker], deque()).append(worker)
        ids: dict[int, int] = {}
        for planned in self.joiners:
            at = target.coordinate_of(planned)
            assert at is not None
            if here := there.get(target.node_at(at)):
                ids[planned] = here.popleft()
        elsewhere = sorted({*came} - {*ids.values()})
        ids |= zip((w for w in self.joiners if w not in ids), elsewhere, strict=True)
        workers = tuple(ids.get(worker, worker) for worker in target.workers)
        placed = zip(workers, target.nodes, strict=False)  # there may be no nodes known
        nodes_now = tuple(on.get(worker, node) for worker, node in placed)
        return RankMap(target.layout, workers, nodes_now)


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
class StateSaved:
    """What became of the checkpoint of a step; problem: why there is none."""

    step: int
    problem: str = ""


@dataclass(frozen=True)
class DeadlinePassed:
    """`HandoffMachine.deadline` has expired."""


FromParticipant = m.Hello | m.OfAttempt | m.Finished
Event = FromParticipant | Requested | WorkerLost | Cancelled | StateSaved | DeadlinePassed
