"""Whether all copies of the state agree in the world that trains, by its workers' digests."""

from __future__ import annotations

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.messages import ClassDigest, Verified
from liver_hpc.protocol.votes import Side, disagreements


class Verification:
    """The newest comparison; one that a later one overtakes is dropped."""

    def __init__(self) -> None:
        self._of = (-1, -1)
        self._told: dict[int, tuple[ClassDigest, ...]] = {}

    def tell(self, message: Verified, world: RankMap) -> str:
        """Takes one worker's digests; once all workers of the world have told theirs: which copies
        differ, as text. Empty where none does."""
        of = (message.generation, message.step)
        if of != self._of:
            self._of, self._told = of, {}
        self._told[message.worker] = message.digests
        if len(self._told) < len(world.workers) or self._told.keys() != {*world.workers}:
            return ""
        return "; ".join(disagreements(Side("world", world, self._told)))
