"""Records of a run into its HDF5 file while it runs, and out of it at any time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from liver_hpc.config.schema import MetricsSection
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.report.hdf5 import HDF5_ERRORS, SwmrFile, failure_text, read_file
from liver_hpc.report.probe import probe
from liver_hpc.report.table import (
    BASELINES,
    NETWORKS,
    NOTICES,
    RECONFIGURATIONS,
    STEPS,
    TABLES,
    TRAFFIC,
    WORKER_PHASES,
    Rows,
    Table,
)
from liver_hpc.run.records import (
    BaselineRecord,
    NetworkRecord,
    NoticeRecord,
    ReconfigurationRecord,
    RunRecords,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)

log = logging.getLogger(__name__)

WAITING_BYTES = 16 * 2**20
"""Rows of one table that wait in memory for a disk that takes none; then the oldest go."""


def free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user may still write in a directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class _Queue:
    """Rows of one table that are not in the file yet, the newest last."""

    def __init__(self, table: Table[Any], limit_bytes: int) -> None:
        self._table = table
        self._limit = max(1, limit_bytes // table.dtype.itemsize)
        self._rows: deque[Rows] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: Any) -> None:
        self._rows.append(self._table.rows([record]))
        self._trim()

    def take(self) -> list[Rows]:
        taken = list(self._rows)
        self._rows.clear()
        return taken

    def give_back(self, taken: list[Rows]) -> None:
        """Before whatever has come meanwhile."""
        self._rows.extendleft(reversed(taken))
        self._trim()

    def _trim(self) -> None:
        while len(self._rows) > self._limit:
            self._rows.popleft()
            self.dropped += 1


class MetricsWriter:
    """Writes a run's records; the only writer of its file. All methods may be called in any thread.

    Rows reach the file within `config.flush_interval_s`. Neither a full nor a broken disk raises:
    `error` then says what is wrong, rows wait in memory, and every interval is another attempt.
    A file that is already at `path` is of an earlier life of the run: its rows stay, before the new
    ones, with this life's attributes. One that cannot be read, or has other columns, is kept as
    `metrics.1.h5`.

    last_generation: the highest number of a world in the rows of earlier lives; -1 without any.
    """

    def __init__(
        self,
        path: Path,
        config: MetricsSection,
        attributes: Mapping[str, str],
        free: Callable[[Path], int] = free_bytes,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self.error = ""
        self._path = path
        self._config = config
        self._attributes = dict(attributes)
        self._free = free
        # The lock of the file is taken before, and never within, that of the queues.
        self._file_lock = threading.Lock()
        self._file: SwmrFile | None = None
        self._written: dict[str, int] = {}
        self._earlier = _earlier_rows(path)
        self.last_generation = _last_generation(self._earlier)
        self._wake = threading.Condition()
        self._queues = {table.name: _Queue(table, waiting_bytes) for table in TABLES}
        self._closing = False
        self._closed = False
        self._flushed_s = 0.0
        self.flush()  # so that there is a file from the start
        self._thread = threading.Thread(target=self._flush_by_time, name="metrics", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Rows that memory could not keep while the disk took none."""
        return sum(queue.dropped for queue in self._queues.values())

    def add_step(self, record: StepRecord) -> None:
        self._add(STEPS, record)

    def add_reconfiguration(self, record: ReconfigurationRecord) -> None:
        self._add(RECONFIGURATIONS, record)

    def add_baseline(self, record: BaselineRecord) -> None:
        self._add(BASELINES, record)

    def add_notice(self, record: NoticeRecord) -> None:
        self._add(NOTICES, record)

    def add_network(self, record: NetworkRecord) -> None:
        self._add(NETWORKS, record)

    def add_worker_phase(self, record: WorkerPhaseRecord) -> None:
        self._add(WORKER_PHASES, record)

    def add_traffic(self, record: TrafficRecord) -> None:
        self._add(TRAFFIC, record)

    def flush(self) -> None:
        """Writes what waits; on return it is in the file, or `error` says why not."""
        with self._file_lock:
            if self._closed:
                return
            with self._wake:
                taken = {name: queue.take() for name, queue in self._queues.items() if queue}
            try:
                self._check_space()
                self._write({name: np.concatenate(rows) for name, rows in taken.items()})
            except (*HDF5_ERRORS, LiverError) as error:
                with self._wake:
                    for name, rows in taken.items():
                        self._queues[name].give_back(rows)
                self._note_failure(error)
            else:
                self._note_success()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Writes what waits and ends; what cannot be written now is lost, and `error` says so."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        self.flush()
        with self._file_lock:
            self._closed = True
            file, self._file = self._file, None
            if file is None:
                return
            try:
                file.close()
            except HDF5_ERRORS as error:
                self._note_failure(error)

    # ---- in the caller's thread

    def _add(self, table: Table[Any], record: Any) -> None:
        with self._wake:
            if self._closing:
                raise LiverError(f"{self._path} is closed: a record of {table.name} came too late")
            self._queues[table.name].add(record)
            self._wake.notify_all()

    # ---- in the writer's own thread

    def _flush_by_time(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or any(self._queues.values()))
                due_s = self._flushed_s + self._config.flush_interval_s
                self._wake.wait_for(lambda: self._closing, max(0.0, due_s - time.monotonic()))
                if self._closing:
                    return
            self.flush()

    # ---- with the file's lock held

    def _check_space(self) -> None:
        wanted, got = self._config.reserve_bytes, self._free(self._path.parent)
        if got < wanted:
            raise LiverError(f"the disk is full: wanted {wanted} bytes free, got {got}")

    def _write(self, rows: dict[str, Rows]) -> None:
        if self._file is None:
            self._file = self._open()
        try:
            self._file.append(rows)
        except HDF5_ERRORS:
            file, self._file = self._file, None
            file.let_go()
            raise
        for name, new in rows.items():
            self._written[name] += len(new)

    def _open(self) -> SwmrFile:
        """A new file with all rows of the one before it: of an earlier life of the run, or of this
        one, when that could not be written to."""
        rows = self._earlier
        if self._written:
            found, _ = read_file(self._path)
            rows = {name: found[name][:count] for name, count in self._written.items()}
        elif not rows:
            _set_aside(self._path)
        file = SwmrFile(self._path, self._attributes, rows)
        self._written = {table.name: len(rows.get(table.name, ())) for table in TABLES}
        self._earlier = {}  # they are in the file
        return file

    def _note_failure(self, error: Exception) -> None:
        waiting = sum(map(len, self._queues.values()))
        text = f"{self._path}: {failure_text(error)}; {waiting} rows wait in memory"
        if self.dropped:
            text += f", {self.dropped} older ones were dropped"
        if not self.error:
            log.warning("%s", text)
        self.error = text

    def _note_success(self) -> None:
        if self.error:
            log.warning("%s can be written again; %d rows were dropped", self._path, self.dropped)
        self.error = ""


def read_run(path: Path) -> RunRecords:
    """All records of a run, also of one that is going on or was killed.

    May never return for a file with damage in its middle: `metrics/probe.py` finds that out.
    Raises ConfigError when the file is missing, truncated, or no metrics file.
    """
    rows, attributes = read_file(path)
    return RunRecords(
        steps=STEPS.records(rows[STEPS.name]),
        reconfigurations=RECONFIGURATIONS.records(rows[RECONFIGURATIONS.name]),
        baselines=BASELINES.records(rows[BASELINES.name]),
        attributes=attributes,
        notices=NOTICES.records(rows[NOTICES.name]),
        networks=NETWORKS.records(rows[NETWORKS.name]),
        worker_phases=WORKER_PHASES.records(rows[WORKER_PHASES.name]),
        traffic=TRAFFIC.records(rows[TRAFFIC.name]),
    )


def _earlier_rows(path: Path) -> dict[str, Rows]:
    """Rows by table name that an earlier life of the run has left; {} without any to go on with."""
    if not path.exists():
        return {}
    try:
        probe(path)
        rows, _ = read_file(path)
    except ConfigError as error:
        log.warning("%s; it is set aside", error)
        return {}
    other = [table.name for table in TABLES if rows[table.name].dtype != table.dtype]
    if other:
        log.warning("%s has other columns in %s; it is set aside", path, ", ".join(other))
        return {}
    return rows


def _last_generation(rows: Mapping[str, Rows]) -> int:
    """The highest number of a world or of an attempt; -1 without any."""
    columns = [rows[table.name]["generation"] for table in (STEPS, RECONFIGURATIONS) if rows]
    return max((int(column.max()) for column in columns if len(column)), default=-1)


def _set_aside(path: Path) -> None:
    number = 1
    while path.exists():
        kept = path.with_suffix(f".{number}{path.suffix}")
        if not kept.exists():
            path.rename(kept)
        number += 1
