"""A world filled from a checkpoint: every worker reads the parts of files that it needs, alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from liver_hpc.checkpoint.boxes import reads
from liver_hpc.checkpoint.hdf5 import BoxesReader, dataset_name
from liver_hpc.checkpoint.index import CheckpointIndex, SavedModel, read_index
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.messages import Restored
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import World


def restore(world: World, path: Path) -> Restored:
    """Fills a world, of whatever layout, from the checkpoint in `path`; what it now holds.

    Not collective. Raises CheckpointError, naming the file, where that cannot be done.
    """
    index = read_index(path)
    read_parts(world.state, index, path)
    world.load_scalar_state(index.scalars)
    return Restored(
        worker=world.worker,
        generation=world.generation,
        scalars=world.scalar_state(index.scalars.step),
        digests=world.state.digests((PARAMETER, *world.recipe.spec.optimizer_kinds)),
    )


def read_parts(state: WorldState, index: CheckpointIndex, path: Path) -> None:
    """All boxes of a state, from the files that hold them; raises CheckpointError."""
    difference = index.model.difference(SavedModel.of(state.model))
    if difference:
        raise CheckpointError(f"{path} is of another model: {difference}")
    wanted = reads(state.model, index.rank_map.rank_map().layout, state.layout, state.at)
    for rank, group in groupby(wanted, key=lambda read: read.rank):
        with BoxesReader(path / index.parts[rank].file) as file:
            for read in group:
                tensor = state.model.tensors[read.tensor_index]
                name = dataset_name(read.kind, tensor.name, read.saved)
                view = state.view(read.kind, read.tensor_index, read.part)
                file.read(name, read.saved, read.part, view)
