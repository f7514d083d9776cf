"""A worker's part of a checkpoint: it writes the boxes that are its to write, flushed to the disk,
and reads those that its world needs, alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from liver_hpc.checkpoint.copied import BoxView
from liver_hpc.checkpoint.index import (
    SavedModel,
    has_index,
    part_key,
    partial_path,
    read_index,
)
from liver_hpc.checkpoint.torch_dist.parts import PartWriter, Peers, read, read_weights
from liver_hpc.errors import CheckpointError
from liver_hpc.host.process import quiet_thread
from liver_hpc.protocol.messages import ClassDigest, Restored, Saved, ScalarState
from liver_hpc.world.context import FAILURES, WorkerContext
from liver_hpc.world.world import World

log = logging.getLogger(__name__)


class Save:
    """One worker's part in the checkpoint of step `step` under `directory`. Made at the boundary,
    it needs the world no more. context: of which it sends nothing. waits: whether training waits
    for it: then it has all the time that the run file gives it, and waits for a coordinator that is
    away, without whom a checkpoint of several workers comes to nothing."""

    def __init__(
        self,
        context: WorkerContext,
        world: World,
        step: int,
        directory: Path,
        *,
        waits: bool = False,
    ) -> None:
        self.scalars = world.scalar_state(step)
        self._worker, self.generation = world.worker, world.generation
        self._rank = world.rank_map.layout.rank(world.at)
        self._clock, self._started_s = context.clock, context.clock.now_s()
        self._where, self._waits = directory, waits
        self._writer: PartWriter | None = None
        self._problem = ""
        self._check = world.book.check
        unnamed = partial_path(directory, step, world.generation)
        key_of = partial(part_key, world.generation, step)
        limits = context.config.deadlines
        limit_s = limits.checkpoint_s if waits else limits.collective_s
        away_s = limits.word_s if waits else 0.0
        self._peers = Peers(context.open_store, key_of, limit_s, away_s)
        try:
            self._writer = PartWriter(world, self.scalars, unnamed, self._peers)
        except FAILURES as error:
            self._problem = self._logged(error)

    def now(self, world: World) -> Saved:
        """Writes the world's own memory, while training stands still."""
        kinds, state = world.recipe.spec.kinds, world.state
        return self.done(lambda: (state, state.digests(kinds)))

    def interrupt(self) -> None:
        """Has nobody here wait for a peer's part any more; from any thread."""
        self._peers.close()

    def done(self, take: Callable[[], tuple[BoxView, tuple[ClassDigest, ...]]]) -> Saved:
        """Writes what `take` gives, with digests of all that the worker holds.

        Never raises for a disk that is full or broken: the message then says why. Rank 0 returns
        after all others have written.
        """
        if self._writer is None:
            self._tell_peers(self._problem)
            return self.failed(self._problem)
        try:
            state, digests = take()
            self._check()  # the device is there: parameters have been gathered, or it raises
            if not self._waits and not self._where.parent.is_dir():
                raise CheckpointError(f"{self._where.parent} is gone")  # and may come back
            part = self._writer.write(state)
        except FAILURES as error:
            problem = self._logged(error)
            self._tell_peers(problem)
            return self.failed(problem)
        return Saved(
            worker=self._worker,
            generation=self.generation,
            scalars=self.scalars,
            num_bytes=part.num_bytes,
            checksum=part.checksum,
            took_s=self._clock.now_s() - self._started_s,
            digests=digests,
        )

    def give_up(self, reason: str) -> Saved:
        """What the coordinator is told, at once. Rank 0 hears of it, too, and does not wait for
        this part any longer; where this is rank 0, it waits for none."""
        if self._rank == 0:
            self.interrupt()
        else:
            quiet_thread(lambda: self._tell_peers(reason), "a checkpoint given up")
        return self.failed(reason)

    def _tell_peers(self, problem: str) -> None:
        """Tells rank 0 that this rank's file will not come."""
        if self._rank == 0:
            return
        try:
            self._peers.tell(self._rank, problem)
        except FAILURES:
            log.exception("nobody could be told that step %d is not saved", self.scalars.step)

    def failed(self, reason: str) -> Saved:
        """What the coordinator is told then."""
        worker, generation = self._worker, self.generation
        return Saved(worker=worker, generation=generation, scalars=self.scalars, error=reason)

    def _logged(self, error: Exception) -> str:
        log.exception("step %d cannot be saved in %s", self.scalars.step, self._where)
        return getattr(error, "strerror", None) or str(error)


def restore(world: World, path: Path, weights: bool = False) -> Restored:
    """Fills a world, of whatever layout, from the checkpoint in `path`, or from its weights alone;
    what it now holds.

    Not collective. Raises CheckpointError, naming the file, where that cannot be done.
    """
    scalars = read_weights(world, path) if weights else _restored_scalars(world, path)
    world.load_scalar_state(scalars)
    return Restored(
        worker=world.worker,
        generation=world.generation,
        scalars=world.scalar_state(scalars.step),
        digests=world.state.digests(world.recipe.spec.kinds),
    )


def _restored_scalars(world: World, path: Path) -> ScalarState:
    index = read_index(path) if has_index(path) else None  # else of another job
    if index is not None:
        difference = index.model.difference(SavedModel.of(world.recipe.spec))
        if difference:
            raise CheckpointError(f"{path} is of another model: {difference}")
    scalars = read(world, path)
    return scalars if index is None else index.scalars
