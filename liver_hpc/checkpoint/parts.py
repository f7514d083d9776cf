"""A worker's part of a checkpoint: it writes the boxes that are its to write, flushed to the disk,
and reads those that its world needs, alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from liver_hpc.checkpoint.copied import BoxView
from liver_hpc.checkpoint.hdf5 import BoxesReader, BoxesWriter, dataset_name
from liver_hpc.checkpoint.index import (
    INDEX_FILE,
    CheckpointIndex,
    Part,
    SavedModel,
    part_name,
    partial_path,
    read_index,
    written_part,
)
from liver_hpc.checkpoint.torch_dist import parts as torch_dist
from liver_hpc.checkpoint.written import written_boxes
from liver_hpc.errors import CheckpointError, PlanError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import Copies
from liver_hpc.layout.tensors import Box, ModelSpec
from liver_hpc.protocol.messages import ClassDigest, Restored, Saved
from liver_hpc.report.hdf5 import failure_text
from liver_hpc.world.context import FAILURES, WorkerContext
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import World

log = logging.getLogger(__name__)


class Read(NamedTuple):
    """`part` of the box `saved`, which rank `rank` of the saved layout wrote."""

    rank: int
    kind: str
    tensor_index: int
    saved: Box
    part: Box


def reads(
    model: ModelSpec,
    saved: Layout,
    layout: Layout,
    at: Coordinate,
    saved_model: ModelSpec | None = None,
) -> list[Read]:
    """All that a coordinate of `layout` reads of a checkpoint of `saved`, file by file.

    saved_model: the spec of the same model by which it was saved, where that was another one: a
    run's spec knows the splits, stages and buckets of the run's own layouts. Raises PlanError where
    the checkpoint does not hold all that the coordinate needs.
    """
    found: list[Read] = []
    by_name = {t.name: number for number, t in enumerate((saved_model or model).tensors)}
    for index in model.held_tensors(layout, at):
        tensor = model.tensors[index]
        was = (saved_model or model).tensors[number := by_name[tensor.name]]
        if was.whole != tensor.whole:
            raise PlanError(
                f"{tensor.name!r} was saved as a matrix of {was.whole.shape}, here it is one of "
                f"{tensor.whole.shape}: give the run a layout with tp, as it was saved with"
            )
        for kind in model.kinds:
            needed = owned_boxes(model, layout, at, kind, index)
            copies = Copies(saved_model or model, saved, kind, number)
            parts = copies.parts(0, needed, f"{at} of {layout}")
            found += [Read(saved.rank(by), kind, index, own, part) for by, own, part in parts]
    return sorted(found)


class PartWriter(Protocol):
    """Writes one worker's file of one checkpoint."""

    def write(self, state: BoxView) -> Part:
        """Raises FAILURES."""
        ...

    def fail(self, reason: str) -> None:
        """This worker's file will not come; whoever waits for it goes on."""
        ...


class Save:
    """One worker's part in the checkpoint of step `step` under `directory`. Made at the boundary,
    it needs the world no more. context: of which it sends nothing."""

    def __init__(self, context: WorkerContext, world: World, step: int, directory: Path) -> None:
        self.scalars = world.scalar_state(step)
        self._worker, self._generation = world.worker, world.generation
        self._clock, self._started_s = context.clock, context.clock.now_s()
        self._where = directory
        self._writer: PartWriter | None = None
        self._problem = ""
        partial = partial_path(directory, step, world.generation)
        try:
            if context.config.checkpoint.format == "torch_dist":
                prefix = f"g{world.generation}/checkpoint/{step}"
                limit_s = context.config.deadlines.collective_s
                peers = torch_dist.Peers(context.open_store, prefix, limit_s)
                self._writer = torch_dist.PartWriter(world, self.scalars, partial, peers)
            else:
                self._writer = _Hdf5Writer(step, partial)
        except FAILURES as error:
            self._problem = self._logged(error)

    def done(self, take: Callable[[], tuple[BoxView, tuple[ClassDigest, ...]]]) -> Saved:
        """Writes what `take` gives, with digests of all that the worker holds.

        Never raises for a disk that is full or broken: the message then says why. In the format
        torch_dist rank 0 returns after all others have written.
        """
        if self._writer is None:
            return self.failed(self._problem)
        try:
            state, digests = take()
            part = self._writer.write(state)
        except FAILURES as error:
            problem = self._logged(error)
            try:
                self._writer.fail(problem)
            except FAILURES:
                log.exception("nobody could be told that step %d is not saved", self.scalars.step)
            return self.failed(problem)
        return Saved(
            worker=self._worker,
            generation=self._generation,
            scalars=self.scalars,
            num_bytes=part.num_bytes,
            checksum=part.checksum,
            took_s=self._clock.now_s() - self._started_s,
            digests=digests,
        )

    def failed(self, reason: str) -> Saved:
        """What the coordinator is told then."""
        worker, generation = self._worker, self._generation
        return Saved(worker=worker, generation=generation, scalars=self.scalars, error=reason)

    def _logged(self, error: Exception) -> str:
        log.exception("step %d cannot be saved in %s", self.scalars.step, self._where)
        return failure_text(error)


def save(context: WorkerContext, world: World, step: int, directory: Path) -> Saved:
    """Writes this worker's part while training stands still; see `Save`."""
    kinds, state = world.recipe.spec.kinds, world.state
    return Save(context, world, step, directory).done(lambda: (state, state.digests(kinds)))


class _Hdf5Writer(NamedTuple):
    step: int
    partial: Path

    def write(self, state: BoxView) -> Part:
        return write_part(state, self.step, self.partial)

    def fail(self, reason: str) -> None:
        """Nobody waits."""


def write_part(state: BoxView, step: int, partial: Path) -> Part:
    """The file of the rank that `state` belongs to; raises HDF5_ERRORS."""
    partial.mkdir(parents=True, exist_ok=True)
    layout, rank = state.layout, state.layout.rank(state.at)
    path = partial / part_name(rank)
    about: dict[str, str | int] = {"step": step, "layout": str(layout), "rank": rank}
    with BoxesWriter(path, about) as file:
        for kind, index, box in written_boxes(state.model, layout, state.at):
            name = dataset_name(kind, state.model.tensors[index].name, box)
            file.write(name, state.view(kind, index, box))
    flush_to_disk(partial)
    return written_part(path)


def restore(world: World, path: Path) -> Restored:
    """Fills a world, of whatever layout, from the checkpoint in `path`; what it now holds.

    Not collective. Raises CheckpointError, naming the file, where that cannot be done.
    """
    if not (path / INDEX_FILE).is_file():
        scalars = torch_dist.read(world, path)
    else:
        index = read_index(path)
        scalars = index.scalars
        if index.format == "torch_dist":
            _check_model(world.state, index, path)
            torch_dist.read(world, path)
        else:
            read_parts(world.state, index, path)
    world.load_scalar_state(scalars)
    return Restored(
        worker=world.worker,
        generation=world.generation,
        scalars=world.scalar_state(scalars.step),
        digests=world.state.digests(world.recipe.spec.kinds),
    )


def _check_model(state: WorldState, index: CheckpointIndex, path: Path) -> None:
    difference = index.model.difference(SavedModel.of(state.model))
    if difference:
        raise CheckpointError(f"{path} is of another model: {difference}")


def read_parts(state: WorldState, index: CheckpointIndex, path: Path) -> None:
    """All boxes of a state, from the files that hold them; raises CheckpointError."""
    _check_model(state, index, path)
    saved = index.rank_map.rank_map().layout
    wanted = reads(state.model, saved, state.layout, state.at, index.spec)
    for rank, group in groupby(wanted, key=lambda read: read.rank):
        with BoxesReader(path / index.parts[rank].file) as file:
            for read in group:
                tensor = state.model.tensors[read.tensor_index]
                name = dataset_name(read.kind, tensor.name, read.saved)
                view = state.view(read.kind, read.tensor_index, read.part)
                file.read(name, read.saved, read.part, view)
