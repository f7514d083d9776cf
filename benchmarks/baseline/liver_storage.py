"""The runtime's own checkpoint, written and read by worker processes that stop and start."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.baseline.storage import Storage
from liver_hpc.checkpoint.index import (
    FORMAT_VERSION,
    CheckpointIndex,
    Part,
    SavedModel,
    complete_checkpoints,
    complete_path,
    partial_path,
    read_index,
    write_index,
)
from liver_hpc.checkpoint.parts import read_parts, write_part
from liver_hpc.clock import SystemClock
from liver_hpc.errors import CheckpointError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.protocol.messages import ScalarState, WireRankMap
from liver_hpc.world.world import World


class LiverStorage(Storage):
    """One file a worker, each box once; worker 0 makes a checkpoint of them."""

    def save(self, world: World, small: ScalarState, directory: Path) -> None:
        partial = partial_path(directory, small.step, world.generation)
        part = write_part(world.state, small.step, partial)
        _told(directory, world.worker).write_text(part.model_dump_json(), encoding="utf-8")
        dist.barrier()
        if world.worker == 0:
            _commit(world, small, directory)
        dist.barrier()

    def load(self, world: World, directory: Path) -> ScalarState:
        found = complete_checkpoints(directory)
        if not found:
            raise CheckpointError(f"{directory} holds no complete checkpoint")
        index = read_index(found[-1][1])
        read_parts(world.state, index, found[-1][1])
        world.load_scalar_state(index.scalars)
        return index.scalars


def _told(directory: Path, worker: int) -> Path:
    """Where a worker says what its part is."""
    return directory / f"part-{worker}.json"


def _commit(world: World, small: ScalarState, directory: Path) -> None:
    """Index of all parts, then name; raises OSError."""
    told = [_told(directory, worker) for worker in range(world.rank_map.layout.workers)]
    parts = tuple(Part.model_validate_json(path.read_bytes()) for path in told)
    index = CheckpointIndex(
        format_version=FORMAT_VERSION,
        run=world.recipe.config.name,
        saved_s=SystemClock().now_s(),
        generation=world.generation,
        scalars=small,
        rank_map=WireRankMap.of(world.rank_map),
        parts=parts,
        digests=(),
        model=SavedModel.of(world.recipe.spec),
        versions={},
        spec=world.recipe.spec.only(world.rank_map.layout),
    )
    partial = partial_path(directory, small.step, world.generation)
    write_index(partial, index)
    partial.rename(complete_path(directory, small.step))
    flush_to_disk(directory)
