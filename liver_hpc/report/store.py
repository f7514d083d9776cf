"""What was recorded of a run: read from its journal, and written out as metrics.h5."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.report.hdf5 import failure_text, read_hdf5, write_hdf5
from liver_hpc.run.codec import RECORDS, record_of, rows_of
from liver_hpc.run.entries import COORDINATOR_STARTED, JOURNAL_FILE, STEP_DONE, read_entries
from liver_hpc.run.records import TABLES, RunRecords, StepRecord

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.h5"


def read_run(run_directory: Path) -> RunRecords:
    """All records of a run, also of one that is going on or was killed: from its journal, else from
    the metrics.h5 of an earlier release or of a benchmark.

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
    tables: dict[str, list[Any]] = {name: [] for name in TABLES}
    attributes: dict[str, str] = {}
    steps = tables["steps"]
    for number, _, event, actions, _ in read_entries(path):
        try:
            kind = event["type"]
            if kind == STEP_DONE:
                steps.append(_step(event, actions))
            elif kind == COORDINATOR_STARTED:
                attributes = event["attributes"]
            for action in actions:
                if action["type"] in RECORDS and (name := action["table"]) in TABLES:
                    tables[name] += (record_of(TABLES[name], row) for row in rows_of(action))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, entry {number}: {error}; another version of liver_hpc wrote it"
            ) from None
    return RunRecords(attributes=attributes, **tables)


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
