"""The runtime's own checkpoint, written and read by worker processes that stop and start."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.baseline.storage import Storage
from liver_hpc.checkpoint.index import (
    FORMAT_VERSION,
    FURTHER_FILES,
    CheckpointIndex,
    Part,
    SavedModel,
    complete_checkpoints,
    partial_path,
    read_index,
    write_index,
    written_part,
)
from liver_hpc.checkpoint.torch_dist.parts import PartWriter, Peers, read
from liver_hpc.clock import SystemClock
from liver_hpc.config.megatron_checkpoint import iteration_path
from liver_hpc.errors import CheckpointError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.protocol.messages import ScalarState, WireRankMap
from liver_hpc.world.world import World


class LiverStorage(Storage):
    """One file a worker, each box once; worker 0 makes a checkpoint of them."""

    def save(self, world: World, small: ScalarState, directory: Path) -> None:
        partial = partial_path(directory, small.step, world.generation)
        part = PartWriter(world, small, partial, _Barrier()).write(world.state)
        _told(directory, world.worker).write_text(part.model_dump_json(), encoding="utf-8")
        dist.barrier()
        if world.worker == 0:
            _commit(world, small, directory)
        dist.barrier()

    def load(self, world: World, directory: Path) -> ScalarState:
        found = complete_checkpoints(directory)
        if not found:
            raise CheckpointError(f"{directory} holds no complete checkpoint")
        scalars = read_index(found[-1][1]).scalars
        read(world, found[-1][1])
        world.load_scalar_state(scalars)
        return scalars


class _Barrier(Peers):
    """Workers meet once each has written; whoever cannot write ends its process, and so the job."""

    def __init__(self) -> None:
        super().__init__(open_store=lambda: None, prefix="", limit_s=0.0)

    def tell(self, rank: int, problem: str) -> None:
        dist.barrier()

    def problems(self, ranks: int) -> list[str]:
        dist.barrier()
        return []


def _told(directory: Path, worker: int) -> Path:
    """Where a worker says what its part is."""
    return directory / f"part-{worker}.json"


def _commit(world: World, small: ScalarState, directory: Path) -> None:
    """Index of all parts, then name; raises OSError."""
    told = [_told(directory, worker) for worker in range(world.rank_map.layout.workers)]
    partial = partial_path(directory, small.step, world.generation)
    index = CheckpointIndex(
        format_version=FORMAT_VERSION,
        run=world.recipe.config.name,
        saved_s=SystemClock().now_s(),
        generation=world.generation,
        scalars=small,
        rank_map=WireRankMap.of(world.rank_map),
        parts=tuple(Part.model_validate_json(path.read_bytes()) for path in told),
        further=tuple(written_part(partial / name) for name in FURTHER_FILES),
        digests=(),
        model=SavedModel.of(world.recipe.spec),
        versions={},
    )
    write_index(partial, index)
    partial.rename(iteration_path(directory, small.step))
    flush_to_disk(directory)
