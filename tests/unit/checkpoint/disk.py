"""A world of plain tensors on disk: its workers' states, written, and committed as a coordinator
would."""

from __future__ import annotations

from pathlib import Path

import torch

from liver_hpc.checkpoint.index import partial_path
from liver_hpc.checkpoint.parts import write_part
from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, TensorSpec
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import ClassDigest, Saved, ScalarState
from liver_hpc.recipes.base import NoOptions
from liver_hpc.run.events import CheckpointFailed, CheckpointWritten
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


class ModelOnly(TinyRecipe):
    """A recipe of which nothing but the tensors matters."""

    def __init__(self, model: ModelSpec, config: RunConfig) -> None:
        super().__init__(NoOptions(), config)
        self.spec = model


class Disk:
    """The checkpoints of a run of `model` in `directory`, whose first worker is `first`."""

    def __init__(self, model: ModelSpec, directory: Path, keep: int = 2) -> None:
        config = tiny_run(checkpoint={"keep": keep})
        self.model = model
        self.run_directory = directory
        self.checkpoints = Checkpoints(config, ModelOnly(model, config), directory, FakeClock())
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

    def save(self, layout: Layout, step: int) -> CheckpointWritten | CheckpointFailed | None:
        """All workers write; returns what came of the last one's part."""
        outcomes = [
            self.checkpoints.saved(self.part(layout, at, step), self.world(layout))
            for at in layout.coordinates()
        ]
        assert not any(outcomes[:-1])
        return outcomes[-1]

    def steps(self) -> list[str]:
        """Everything in the directory."""
        return sorted(path.name for path in self.directory.iterdir())


def restored_rank_map(layout: Layout) -> RankMap:
    return rank_map(layout, first=0)
