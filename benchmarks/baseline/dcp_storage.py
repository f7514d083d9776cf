"""torch.distributed.checkpoint of the same state: every global tensor with the boxes of it that a
worker holds. DCP itself writes each box once and finds the parts that another layout needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.baseline.storage import Storage
from liver_hpc.layout.tensors import PARAMETER, Box
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.world.world import World

_SMALL_FILE = "scalar_state.json"


class DcpStorage(Storage):
    """Files through DCP's own writer and reader, with their defaults."""

    def save(self, world: World, small: ScalarState, directory: Path) -> None:
        if world.worker == 0:
            (directory / _SMALL_FILE).write_text(small.model_dump_json(), encoding="utf-8")
        dcp_save(
            _boxes_of(world),
            storage_writer=FileSystemWriter(directory),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )

    def load(self, world: World, directory: Path) -> ScalarState:
        dcp_load(
            _boxes_of(world),
            storage_reader=FileSystemReader(directory),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        small = ScalarState.model_validate_json((directory / _SMALL_FILE).read_bytes())
        world.load_scalar_state(small)
        return small


class _Boxes:
    """The boxes of one global tensor that this worker holds, as DCP's protocol asks for them."""

    def __init__(self, size: tuple[int, int], views: dict[Box, torch.Tensor]) -> None:
        self._size = torch.Size(size)
        self._views = {(box.row0, box.col0): view for box, view in views.items()}

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """[box rows, box cols] of the box that begins at the index's offset."""
        assert index.offset is not None, f"{index.fqn} has been asked for as a whole"
        return self._views[index.offset[0], index.offset[1]]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(corner)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(corner, view),
                    properties=TensorProperties.create_from_tensor(view),
                    size=self._size,
                ),
            )
            for corner, view in self._views.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(corner, view) for corner, view in self._views.items()]


def _chunk(corner: tuple[int, int], view: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(corner), sizes=view.shape)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].view(index).contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default would put empty memory in the place of whatever it takes for no tensor.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        boxes: _Boxes = self.state_dict[index.fqn]
        return boxes.view(index)


def _boxes_of(world: World) -> dict[str, Any]:
    """ "kind/tensor" -> its boxes here."""
    spec, state = world.recipe.spec, world.state
    found: dict[str, Any] = {}
    for kind in (PARAMETER, *spec.optimizer_kinds):
        views: dict[int, dict[Box, torch.Tensor]] = {}
        for index, box in state.boxes(kind):
            views.setdefault(index, {})[box] = state.view(kind, index, box)
        for index, held in views.items():
            tensor = spec.tensors[index]
            found[f"{kind}/{tensor.name}"] = _Boxes((tensor.rows, tensor.cols), held)
    return found
