"""Each record type as a table of an HDF5 file: its compound type, rows from records and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, astuple, dataclass, fields
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

import h5py
import numpy as np
import numpy.typing as npt

from liver_hpc.run.records import (
    BaselineRecord,
    NetworkRecord,
    NoticeRecord,
    ReconfigurationRecord,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)

Record = TypeVar(
    "Record",
    StepRecord,
    ReconfigurationRecord,
    BaselineRecord,
    NoticeRecord,
    NetworkRecord,
    WorkerPhaseRecord,
    TrafficRecord,
)
Rows = npt.NDArray[np.void]

CHUNK_BYTES = 32 * 2**10
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

# SWMR cannot write strings of variable length, so that every text field has its size, in bytes.
TEXT_BYTES = {
    "phase": 16,
    "source": 64,
    "target": 64,
    "source_workers": 4096,
    "target_workers": 4096,
    "notice": 256,
    "outcome": 16,
    "detail": 2048,
    "method": 64,
    "kind": 32,
    "node": 64,
    "allocation": 64,
    "action": 256,
    "transport": 32,
    "hosts": 4096,
}


@dataclass(frozen=True)
class Table(Generic[Record]):
    """The dataset `name`, one row a record: float64, int64, bool and fixed-length UTF-8."""

    name: str
    record: type[Record]

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        hints = get_type_hints(self.record)
        return np.dtype([(f.name, _column(f.name, hints[f.name])) for f in fields(self.record)])

    @property
    def chunk_rows(self) -> int:
        """Rows that are written together: an appended row rewrites its chunk."""
        return max(1, CHUNK_BYTES // self.dtype.itemsize)

    def rows(self, records: Iterable[Record]) -> Rows:
        """Longer text is cut and ends in an ellipsis. Raises TypeError for a wrong type."""
        texts = [f.name in TEXT_BYTES for f in fields(self.record)]
        sizes = [TEXT_BYTES.get(f.name, 0) for f in fields(self.record)]
        cells = [
            tuple(
                fit_text(value, size) if is_text else value
                for value, size, is_text in zip(astuple(record), sizes, texts, strict=True)
            )
            for record in records
        ]
        return np.array(cells, dtype=self.dtype)

    @property
    def required(self) -> set[str]:
        """The columns that a file of any version has; a later one has a default in its record."""
        return {f.name for f in fields(self.record) if f.default is MISSING}

    def records(self, rows: Rows) -> list[Record]:
        """The records of rows that have at least the required columns."""
        names = [f.name for f in fields(self.record) if f.name in (rows.dtype.names or ())]
        return [
            self.record(**dict(zip(names, map(_plain, row), strict=True)))
            for row in rows[names].tolist()
        ]


STEPS = Table("steps", StepRecord)
RECONFIGURATIONS = Table("reconfigurations", ReconfigurationRecord)
BASELINES = Table("baselines", BaselineRecord)
NOTICES = Table("notices", NoticeRecord)
NETWORKS = Table("networks", NetworkRecord)
WORKER_PHASES = Table("worker_phases", WorkerPhaseRecord)
TRAFFIC = Table("traffic", TrafficRecord)
TABLES: tuple[Table[Any], ...] = (
    STEPS,
    RECONFIGURATIONS,
    BASELINES,
    NOTICES,
    NETWORKS,
    WORKER_PHASES,
    TRAFFIC,
)
FIRST_TABLES = (STEPS, RECONFIGURATIONS, BASELINES)
"""What every file has had from the beginning; the others came later."""


def fit_text(text: str, size_bytes: int) -> bytes:
    """UTF-8 of at most `size_bytes`, cut between characters; zero bytes would end the text."""
    data = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
    if len(data) <= size_bytes:
        return data
    end = ELLIPSIS.encode()
    return data[: size_bytes - len(end)].decode("utf-8", "ignore").encode() + end


def _column(name: str, kind: type) -> Any:
    if kind is str:
        return h5py.string_dtype("utf-8", TEXT_BYTES[name])
    return {float: np.float64, int: np.int64, bool: np.bool_}[kind]


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
