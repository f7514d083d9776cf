"""A run's records into its journal, one entry each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from liver_hpc.clock import Clock
from liver_hpc.report.store import METRICS_FILE, read_run, write_metrics
from liver_hpc.run.entries import COORDINATOR_STARTED, JOURNAL_FILE, STEP_DONE
from liver_hpc.run.journal import Journal
from liver_hpc.run.records import (
    NetworkRecord,
    NoticeRecord,
    ReconfigurationRecord,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)

log = logging.getLogger(__name__)

CLOSE_S = 10.0


class JournalMetrics:
    """The journal of a run directory. At the end metrics.h5 is made of it.

    last_generation: the highest number of a world in what is there already; -1 without any.
    """

    def __init__(
        self, directory: Path, reserve_bytes: int, attributes: Mapping[str, str], clock: Clock
    ) -> None:
        self._directory, self._clock = directory, clock
        self.last_generation = _last_generation(directory)
        self._journal = Journal(directory / JOURNAL_FILE, lambda told: None, reserve_bytes)
        self._append({"type": COORDINATOR_STARTED, "attributes": dict(attributes)})

    @property
    def error(self) -> str:
        return self._journal.error

    def add_step(self, record: StepRecord) -> None:
        event = {"type": STEP_DONE, "worker": 0, **asdict(record)}
        phase = event.pop("phase")
        self._append(event, [{"type": "step_phase", "phase": phase}] if phase else [])

    def add_reconfiguration(self, record: ReconfigurationRecord) -> None:
        self._record("reconfigurations", record)

    def add_notice(self, record: NoticeRecord) -> None:
        self._record("notices", record)

    def add_network(self, record: NetworkRecord) -> None:
        self._record("networks", record)

    def add_worker_phase(self, record: WorkerPhaseRecord) -> None:
        self._record("worker_phases", record)

    def add_traffic(self, record: TrafficRecord) -> None:
        self._record("traffic", record)

    def close(self) -> None:
        self._journal.close(CLOSE_S)
        write_metrics(self._directory)

    def _record(self, table: str, record: Any) -> None:
        row = {"type": "record", "table": table, "row": asdict(record)}
        self._append({"type": "recorded"}, [row])

    def _append(
        self, event: Mapping[str, Any], actions: list[dict[str, Any]] | None = None
    ) -> None:
        self._journal.append(self._clock.now_s(), event, actions or [])


def _last_generation(directory: Path) -> int:
    """Of a run that an earlier release began, metrics.h5 is kept under another name."""
    journal, metrics = directory / JOURNAL_FILE, directory / METRICS_FILE
    if not journal.exists() and not metrics.exists():
        return -1
    records = read_run(directory)
    if not journal.exists():
        kept = metrics.rename(metrics.with_suffix(".1.h5"))
        log.warning("what an earlier release has recorded of this run is kept as %s", kept)
    numbers = {step.generation for step in records.steps}
    numbers |= {attempt.generation for attempt in records.reconfigurations}
    return max(numbers, default=-1)
