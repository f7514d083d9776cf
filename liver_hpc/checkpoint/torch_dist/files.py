"""The files of a torch_dist checkpoint, as torch.distributed.checkpoint has them.

.metadata           which box of which key's tensor lies where: a pickle
__<rank>_0.distcp   one tensor behind the other, each as torch.save writes it
metadata.json       that it is of this format
common.pt           what is in no tensor, by torch.save; from 0.19 on it is an object among the
                    others, and this file, which such a release still reads, is written here

While it is written, each rank's list of what is in its file lies beside it; .metadata is made of
those once all are there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.serialization.config  # torch.save would as it first saves, when it may be gone
from pydantic import BaseModel, ValidationError
from torch.distributed.checkpoint import filesystem, metadata

from liver_hpc.checkpoint.index import part_name, read_twice
from liver_hpc.checkpoint.torch_dist.pickled import DAMAGE, torch_loaded, unpickled, unreadable
from liver_hpc.config.megatron_checkpoint import COMMON_FILE, FORMAT_FILE, METADATA_FILE
from liver_hpc.errors import CheckpointError
from liver_hpc.host.files import write_whole
from liver_hpc.world.sharded import NBox

_StorageInfo = vars(filesystem)["_StorageInfo"]
_COMMON_OBJECT = "common_state/shard_0_1"
"""Of 0.19 and later: a list of the one state."""


@dataclass(frozen=True, order=True)
class Place:
    """Bytes of a file of the checkpoint."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Tensor:
    """What lies under a key: the tensor's shape, torch's name of its dtype, and its boxes."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[NBox, Place], ...]


@dataclass(frozen=True)
class Table:
    """.metadata: tensors by key, and objects by their names."""

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Place]


def read_table(path: Path) -> Table:
    """Of the checkpoint in `path`; raises CheckpointError."""
    file = path / METADATA_FILE
    saved = unpickled(file)
    try:
        return _table(saved)
    except DAMAGE as error:
        raise unreadable(file, error) from error


def _table(saved: Any) -> Table:
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): Place(
            info.relative_path, info.offset, info.length
        )
        for index, info in saved.storage_data.items()
        if not getattr(info, "transform_descriptors", None)
    }
    tensors, objects = {}, {}
    for key, held in saved.state_dict_metadata.items():
        if not isinstance(held, metadata.TensorStorageMetadata):
            objects[key] = places[key, None]
            continue
        chunks = (
            (tuple(zip(chunk.offsets, chunk.sizes, strict=True)), tuple(chunk.offsets))
            for chunk in held.chunks
        )
        tensors[key] = Tensor(
            tuple(held.size),
            dtype_name(held.properties.dtype),
            tuple((box, places[key, offsets]) for box, offsets in chunks),
        )
    return Table(tensors, objects)


class Reader:
    """Reads what lies at places of a checkpoint's files; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = ExitStack()
        self._name = ""
        self._file: Any = None

    def read(self, place: Place) -> Any:
        """A tensor or an object, on the CPU; raises CheckpointError, naming the file."""
        try:
            return torch_loaded(io.BytesIO(read_twice(lambda: self._bytes(place))))
        except DAMAGE as error:
            raise unreadable(self._path / place.file, error) from error

    def _bytes(self, place: Place) -> bytes:
        name, self._name = self._name, ""  # until it has been read: else it is opened anew
        if place.file != name:
            self._open.close()
            self._file = self._open.enter_context((self._path / place.file).open("rb"))
        self._file.seek(place.start)
        data: bytes = self._file.read(place.num_bytes)
        self._name = place.file
        return data

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()


def read_common(path: Path, table: Table) -> dict[str, Any]:
    """What is in no tensor of the checkpoint in `path`; raises CheckpointError."""
    file = path / COMMON_FILE
    place = table.objects.get(_COMMON_OBJECT)
    if place is not None and not file.exists():
        with Reader(path) as reader:
            held = reader.read(place)
        file, found = path / place.file, held[0] if isinstance(held, list) and held else held
    else:
        try:
            with file.open("rb") as stream:
                found = torch_loaded(stream)
        except DAMAGE as error:
            raise unreadable(file, error) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, wanted a dict")
    return found


# ---- written


class Written(BaseModel):
    """A box of a key's tensor, or an object (without a shape), at a place of a rank's file."""

    key: str
    start: int
    num_bytes: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class RankList(BaseModel):
    """What a rank has written. about: further facts of it, of which rank 0 knows what they mean."""

    written: tuple[Written, ...]
    about: Any = None


def _list_file(rank: int) -> str:
    return f"__{rank}_0.json"


class RankWriter:
    """One rank's file, being written; a context manager that leaves it and its list on the disk.
    Raises OSError for a disk that is full or broken."""

    def __init__(self, path: Path, rank: int, about: Any = None) -> None:
        self._path, self._rank, self._about = path, rank, about
        self._written: list[Written] = []
        self._file = (path / part_name(rank)).open("wb")

    def add(self, keys: Iterable[str], shape: tuple[int, ...], at: NBox, view: Any) -> None:
        """A box of a tensor of this shape, under one key or several, whose bytes are the same."""
        sizes = tuple(length for _, length in at)
        data = torch.empty(sizes, dtype=view.dtype)  # a copy: memory of the world stays its own
        data.view(view.shape).copy_(view)
        start, num_bytes = self._save(data)
        for key in keys:
            self._written.append(
                Written(
                    key=key,
                    start=start,
                    num_bytes=num_bytes,
                    shape=shape,
                    dtype=dtype_name(view.dtype),
                    offsets=tuple(first for first, _ in at),
                    sizes=sizes,
                )
            )

    def add_object(self, name: str, value: Any) -> None:
        start, num_bytes = self._save([value])
        self._written.append(Written(key=name, start=start, num_bytes=num_bytes))

    def _save(self, value: Any) -> tuple[int, int]:
        start = self._file.tell()
        try:
            torch.save(value, self._file)
        except RuntimeError as error:  # torch says of a full disk that its archive is broken
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return start, self._file.tell() - start

    def __enter__(self) -> RankWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is None:
            text = RankList(written=tuple(self._written), about=self._about).model_dump_json()
            write_whole(self._path / _list_file(self._rank), text)


def rank_lists(path: Path, ranks: int) -> Iterator[RankList]:
    """What each rank has written, in their order; raises CheckpointError."""
    for rank in range(ranks):
        file = path / _list_file(rank)
        try:
            yield RankList.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


def write_table(path: Path, lists: Iterable[RankList]) -> None:
    """Makes .metadata of what all ranks have written, and removes their lists. Raises OSError."""
    keys: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    files = []
    for rank, one in enumerate(lists):
        files.append(path / _list_file(rank))
        for item in one.written:
            info = _StorageInfo(part_name(rank), item.start, item.num_bytes)
            if item.shape is None:
                keys[item.key] = metadata.BytesStorageMetadata()
                places[metadata.MetadataIndex(item.key)] = info
                continue
            if item.key not in keys:
                dtype = getattr(torch, item.dtype)
                properties = metadata.TensorProperties(dtype=dtype)
                size = torch.Size(item.shape)
                keys[item.key] = metadata.TensorStorageMetadata(properties, size, [])
            chunks = keys[item.key].chunks
            offsets, sizes = torch.Size(item.offsets), torch.Size(item.sizes)
            places[metadata.MetadataIndex(item.key, offsets, len(chunks))] = info
            chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
    saved = metadata.Metadata(state_dict_metadata=keys, planner_data={}, storage_data=places)
    write_whole(path / METADATA_FILE, pickle.dumps(saved), sync=True)
    for file in files:
        file.unlink(missing_ok=True)


def write_common(path: Path, state: Mapping[str, Any]) -> None:
    """common.pt, and then that the checkpoint is of this format. Raises OSError."""
    data = io.BytesIO()
    torch.save(dict(state), data)
    write_whole(path / COMMON_FILE, data.getvalue(), sync=True)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    about |= {"common_backend": "torch", "common_backend_version": 1}
    write_whole(path / FORMAT_FILE, json.dumps(about), sync=True)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_bytes(name: str) -> int:
    """Of an element of the dtype that torch calls so."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize
