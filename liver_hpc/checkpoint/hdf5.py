"""One rank's file: HDF5, one contiguous dataset for each box that it wrote.

    /<kind>/<tensor name>/<row0>:<row1>,<col0>:<col1>    [box rows, box cols]

The attribute `dtype` of a dataset is torch's name. What numpy does not know (bf16, fp8), and fp16,
lies there as integers of the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy.typing as npt
import torch

from liver_hpc.errors import CheckpointError
from liver_hpc.layout.tensors import Box
from liver_hpc.report.hdf5 import FORMAT, HDF5_ERRORS, failure_text

Array = npt.NDArray[Any]


def dataset_name(kind: str, tensor_name: str, box: Box) -> str:
    return f"{kind}/{tensor_name}/{box.row0}:{box.row1},{box.col0}:{box.col1}"


class BoxesWriter:
    """A file that is being written, a context manager that leaves it flushed to the disk. Raises
    OSError for a disk that is full or broken."""

    def __init__(self, path: Path, attributes: dict[str, str | int]) -> None:
        self._sink = _Sink(path)
        self._file = h5py.File(self._sink, "w", libver=FORMAT)
        self._file.attrs.update(attributes)
        self._copy = torch.empty(0, dtype=torch.uint8)

    def write(self, name: str, view: torch.Tensor) -> None:
        """A box, [box rows, box cols], from any device and with any strides."""
        dataset = self._file.create_dataset(name, data=self._to_numpy(view))
        dataset.attrs["dtype"] = _dtype_name(view)
        self._sink.check()

    def _to_numpy(self, view: torch.Tensor) -> Array:
        """Valid until the next call.

        A copy: memory that numpy has seen cannot be given back when the world ends. Always in the
        same place: between copies of their own HDF5's small allocations would lie, and the heap
        would grow by all that is written.
        """
        if self._copy.numel() < view.nbytes:
            self._copy = torch.empty(view.nbytes, dtype=torch.uint8)
        tensor = self._copy[: view.nbytes].view(view.dtype).view(view.shape).copy_(view)
        if tensor.element_size() <= 2 and tensor.dtype.is_floating_point:
            tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8)
        array: Array = tensor.numpy()
        return array

    def __enter__(self) -> BoxesWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            self._sink.takes_more = False
        with self._sink:
            self._file.close()
            if kind is None:
                self._sink.check()
                os.fsync(self._sink.fileno())


class _Sink(FileIO):
    """What HDF5 writes to. After a failed write HDF5 crashes the process sooner or later, so it
    never hears of one: from then on nothing is written any more, and `check` says why."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._error: OSError | None = None
        self.takes_more = True

    def check(self) -> None:
        """Raises what the first failure was."""
        if self._error is not None:
            raise self._error

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        length = len(rest)
        with self._failures_kept():
            while rest and self.takes_more:
                rest = rest[super().write(rest) :]
        return length

    def truncate(self, size: int | None = None, /) -> int:
        with self._failures_kept():
            if self.takes_more:
                super().truncate(size)
        return size or 0

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error
            self.takes_more = False


class BoxesReader:
    """A file that is read; a context manager. Raises CheckpointError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = h5py.File(path, "r", locking=False)
        except HDF5_ERRORS as error:
            raise CheckpointError(f"{path} cannot be read: {failure_text(error)}") from error

    def read(self, name: str, saved: Box, part: Box, into: torch.Tensor) -> None:
        """`part` of the dataset of the box `saved`, into a view of the part's shape."""
        try:
            dataset = self._file.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise CheckpointError(f"{self._path} lacks {name}")
            wanted = (saved.row1 - saved.row0, saved.col1 - saved.col0)
            dtype = str(dataset.attrs.get("dtype"))
            if dataset.shape != wanted or dtype != _dtype_name(into):
                raise CheckpointError(
                    f"{self._path}: {name} is {dataset.shape} of {dtype}, "
                    f"wanted {wanted} of {_dtype_name(into)}"
                )
            rows = slice(part.row0 - saved.row0, part.row1 - saved.row0)
            cols = slice(part.col0 - saved.col0, part.col1 - saved.col0)
            data = dataset[rows, cols]
        except HDF5_ERRORS as error:
            raise CheckpointError(
                f"{self._path}: {name} cannot be read: {failure_text(error)}"
            ) from error
        into.copy_(torch.from_numpy(data).view(into.dtype))

    def __enter__(self) -> BoxesReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._file.close()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
