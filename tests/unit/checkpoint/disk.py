"""A world of plain tensors on disk: its workers' states, written, and committed as a coordinator
would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from liver_hpc.checkpoint.copied import BoxView
from liver_hpc.checkpoint.index import Part, partial_path
from liver_hpc.checkpoint.torch_dist import parts as torch_dist
from liver_hpc.checkpoint.torch_dist.contents import common_state, read_contents
from liver_hpc.checkpoint.torch_dist.files import rank_lists, write_common, write_table
from liver_hpc.clock import FakeClock
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.checkpoints import Checkpoints, Found
from liver_hpc.coordinator.file_work import FileWork
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, TensorSpec
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import (
    ClassDigest,
    NotRestored,
    Restored,
    Saved,
    ScalarState,
)
from liver_hpc.recipes.base import NoOptions
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.events import CheckpointDoubted, CheckpointFailed, CheckpointWritten
from liver_hpc.world.sharded import Sharded
from liver_hpc.world.state import WorldState
from tests.fakes import TinyRecipe, tiny_run
from tests.unit.layout.models import rank_map
from tests.unit.world.test_state import state_at


def scalar_state(step: int) -> ScalarState:
    return ScalarState(
        step=step, consumed_samples=8 * step, optimizer_step=step, loss_scale=1.0, seed=1234
    )


def value_of(tensor: TensorSpec, kind: str) -> torch.Tensor:
    """A whole tensor whose elements differ from one another, and from those of other kinds."""
    elements = torch.arange(tensor.elements, dtype=torch.float32)
    shift = float(sum(map(ord, tensor.name + kind)) % 97)
    return (elements + shift).reshape(tensor.rows, tensor.cols) / 128


def filled(model: ModelSpec, layout: Layout, at: Coordinate) -> WorldState:
    """A worker's state, every element a function of its kind and place in the model."""
    state = empty(model, layout, at)
    for kind in (PARAMETER, *model.optimizer_kinds):
        for index, box in state.boxes(kind):
            whole = value_of(model.tensors[index], kind)
            state.view(kind, index, box).copy_(whole[box.row0 : box.row1, box.col0 : box.col1])
    return state


def empty(model: ModelSpec, layout: Layout, at: Coordinate) -> WorldState:
    return state_at(model, layout, at, torch.float32 if model.main_is_parameter else torch.bfloat16)


def digests_of(state: WorldState) -> tuple[ClassDigest, ...]:
    return state.digests((PARAMETER, *state.model.optimizer_kinds))


# ---- files


def pieces_of(model: ModelSpec) -> dict[str, tuple[Sharded, ...]]:
    """Each tensor lies whole under its own name."""
    pieces = {}
    for tensor in model.tensors:
        whole = tuple((0, length) for length in tensor.shape)
        pieces[tensor.name] = (Sharded(whole, tensor.name, tensor.shape, whole, False),)
    return pieces


_writing = threading.Lock()


def write_part(
    state: BoxView, step: int, partial: Path, check: Callable[[], None] = lambda: None
) -> Part:
    """The file of one rank; the last one makes a checkpoint of them, as rank 0 does that waits."""
    group = {"is_expert_parallel": False}
    pieces = pieces_of(state.model)
    part = torch_dist.write_part(state, pieces, partial, {}, [group], check=check)
    ranks = state.layout.workers
    with _writing:
        if len(list(partial.glob("__*_0.json"))) == ranks:
            write_table(partial, rank_lists(partial, ranks))
            config = tiny_run()
            write_common(
                partial, common_state(config, state.layout, scalar_state(step), [group], {})
            )
    return part


def read_state(state: WorldState, path: Path) -> None:
    torch_dist.read_tensors(state, read_contents(path), pieces_of(state.model))


class PlainWriter:
    """A torch_dist.PartWriter of a world whose recipe has no module, and of which nobody waits."""

    def __init__(self, _world: Any, scalars: ScalarState, partial: Path, peers: Any) -> None:
        self._step, self._partial, self._check = scalars.step, partial, peers.check

    def write(self, state: BoxView) -> Part:
        return write_part(state, self._step, self._partial, self._check)


class ModelOnly(TinyRecipe):
    """A recipe of which nothing but the tensors matters."""

    def __init__(self, model: ModelSpec, config: RunConfig) -> None:
        super().__init__(NoOptions(), config)
        self.spec = model


class _AtOnce(FileWork[Found]):
    """A coordinator may die in what it does."""

    def do(self, task: Callable[[], Found | None]) -> None:
        if (outcome := self._outcome(task)) is not None:
            self.say(outcome)


def opened(config: RunConfig, model: ModelSpec, directory: Path) -> Checkpoints:
    """Those of a run of which nothing but its tensors matters; their files wait for no thread."""
    epoch = Epoch(directory, 1)
    checkpoints = Checkpoints(config, ModelOnly(model, config), epoch, FakeClock())
    checkpoints._files, checkpoints._removals = (_AtOnce("files", epoch) for _ in range(2))
    return checkpoints


def save_part(
    checkpoints: Checkpoints, message: Saved, world: WorldRef, is_finite: bool = True
) -> Any:
    """What has come of it; None where others have yet to say what they have saved."""
    checkpoints.saved(message, world, is_finite)
    return _the_one(checkpoints)


def restore_part(
    checkpoints: Checkpoints, message: Restored | NotRestored, rank_map: RankMap
) -> Any:
    """The same."""
    checkpoints.restored(message, rank_map)
    return _the_one(checkpoints)


def _the_one(checkpoints: Checkpoints) -> Any:
    found = [each for each in checkpoints.found() if not isinstance(each, CheckpointDoubted)]
    assert len(found) < 2
    return found[0] if found else None


class Disk:
    """The checkpoints of a run of `model` in `directory`, whose first worker is `first`; elsewhere:
    where they lie, if not there."""

    def __init__(
        self, model: ModelSpec, directory: Path, keep: int = 2, elsewhere: Path | None = None
    ) -> None:
        config = tiny_run(checkpoint={"keep": keep, "directory": elsewhere})
        self.model = model
        self.run_directory = directory
        self.checkpoints = opened(config, model, directory)
        self.directory = self.checkpoints.directory

    def world(self, layout: Layout, generation: int = 3) -> WorldRef:
        return WorldRef(generation, rank_map(layout, first=5))

    def part(self, layout: Layout, at: Coordinate, step: int) -> Saved:
        """What the worker at one coordinate says once it has written its part."""
        state = filled(self.model, layout, at)
        part = write_part(state, step, partial_path(self.directory, step, 3))
        return Saved(
            worker=self.world(layout).rank_map.worker_at(at),
            generation=3,
            scalars=scalar_state(step),
            num_bytes=part.num_bytes,
            checksum=part.checksum,
            digests=digests_of(state),
        )

    def save(
        self, layout: Layout, step: int, is_finite: bool = True
    ) -> CheckpointWritten | CheckpointFailed | None:
        """All workers write; returns what came of the last one's part."""
        outcomes = [
            save_part(self.checkpoints, self.part(layout, at, step), self.world(layout), is_finite)
            for at in layout.coordinates()
        ]
        assert not any(outcomes[:-1])
        return outcomes[-1]

    def steps(self) -> list[str]:
        """Everything in the directory, but what says which one a job of Megatron's loads."""
        return sorted({path.name for path in self.directory.iterdir()} - {TRACKER_FILE})


def restored_rank_map(layout: Layout) -> RankMap:
    return rank_map(layout, first=0)
