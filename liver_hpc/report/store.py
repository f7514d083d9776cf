"""What was recorded of a run: read from its journal, and written out as metrics.h5."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from liver_hpc.errors import ConfigError
from liver_hpc.report.hdf5 import failure_text, read_hdf5, write_hdf5
from liver_hpc.report.holdings import HoldingsFold
from liver_hpc.run.codec import RECORDS, record_of, rows_of
from liver_hpc.run.entries import (
    COORDINATOR_STARTED,
    JOURNAL_FILE,
    STEP_DONE,
    Entry,
    read_entries,
)
from liver_hpc.run.records import TABLES, MetricRecord, RunRecords, StepRecord

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.h5"


def read_run(run_directory: Path) -> RunRecords:
    """All records of a run, also of one that is going on or was killed: from its journal, else from
    the metrics.h5 of a benchmark.

    Raises ConfigError when there is neither, or it is damaged.
    """
    journal = run_directory / JOURNAL_FILE
    return read_journal(journal) if journal.exists() else read_hdf5(run_directory / METRICS_FILE)


def write_metrics(run_directory: Path) -> None:
    """Makes metrics.h5 of the run's journal. Raises nothing: the log says what went wrong."""
    try:
        write_hdf5(run_directory / METRICS_FILE, read_journal(run_directory / JOURNAL_FILE))
    except ConfigError as error:
        log.warning("%s; no %s is made of it", error, METRICS_FILE)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_directory / METRICS_FILE, failure_text(error))


def read_journal(path: Path) -> RunRecords:
    """The records in a journal, of this release or another: what it does not know is left out.

    Raises ConfigError for a damaged journal, and where a record lacks a field.
    """
    fold = RecordsFold()
    for entry in read_entries(path):
        try:
            fold.take(entry)
        except ConfigError as error:
            raise ConfigError(f"{path}, {error}") from None
    return fold.records


class RecordsFold:
    """A run's records, entry by entry of its journal."""

    def __init__(self) -> None:
        self._records = RunRecords([], [], [], {})
        self.held = HoldingsFold()

    @property
    def records(self) -> RunRecords:
        """So far; its lists grow with what is taken, but for holdings and placements."""
        held = self.held
        return replace(self._records, holdings=held.records, placements=held.placements)

    def take(self, entry: Entry) -> None:
        """Raises ConfigError where a record lacks a field."""
        records, event = self._records, entry.event
        try:
            kind = event["type"]
            if kind == STEP_DONE:
                records.steps.append(_step(event, entry.actions))
                records.metrics.extend(_metrics(event))
            elif kind == COORDINATOR_STARTED:
                records.attributes.clear()
                records.attributes.update(event["attributes"])
            for action in entry.actions:
                if action["type"] in RECORDS and (name := action["table"]) in TABLES:
                    rows = (record_of(TABLES[name], row) for row in rows_of(action))
                    getattr(records, name).extend(rows)
            self.held.take(entry)
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"entry {entry.number}: {error}; another version of liver_hpc wrote it"
            ) from None


def _step(event: dict[str, Any], actions: list[dict[str, Any]]) -> StepRecord:
    """Of a number that is not finite the journal has the word, which `float` knows."""
    phases = [action["phase"] for action in actions if action["type"] == "step_phase"]
    return StepRecord(  # by position: of these there may be a million
        event["step"],
        event["generation"],
        float(event["loss"]),
        float(event["grad_norm"]),
        float(event["learning_rate"]),
        event["tokens"],
        event["started_s"],
        event["ended_s"],
        phases[0] if phases else "",
    )


def _metrics(event: dict[str, Any]) -> Iterator[MetricRecord]:
    """Earlier releases have none."""
    for name, value in event.get("metrics", {}).items():
        yield MetricRecord(event["step"], event["generation"], name, float(value))
