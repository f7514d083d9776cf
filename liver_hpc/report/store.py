"""What was recorded of a run: read from its journal, and written out as metrics.h5."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from liver_hpc.errors import ConfigError
from liver_hpc.protocol.actions import Ended
from liver_hpc.report.hdf5 import failure_text, read_hdf5, write_hdf5
from liver_hpc.report.holdings import HoldingsFold
from liver_hpc.run.attempt_notes import AttemptNotes
from liver_hpc.run.codec import ATTEMPT_BEGINS, RECORDS, decode_attempt, record_of, rows_of
from liver_hpc.run.entries import (
    COORDINATOR_STARTED,
    JOURNAL_FILE,
    STEP_DONE,
    Entry,
    read_entries,
)
from liver_hpc.run.notices import GRANTED
from liver_hpc.run.records import TABLES, MetricRecord, NoticeRecord, RunRecords, StepRecord

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.h5"
BROKEN_OFF = "the coordinator was killed, and its job with it"


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
    """A run's records, entry by entry of its journal. leaves_out: tables that stay empty."""

    def __init__(self, leaves_out: Collection[str] = ()) -> None:
        self._tables = TABLES.keys() - leaves_out
        self._records = RunRecords([], [], [], {})
        self.held = HoldingsFold()
        # One that has begun, and when; not recorded.
        self._attempt: tuple[dict[str, Any], float] | None = None
        self._warned: dict[str, NoticeRecord] = {}  # of nodes, the same

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
                if "metrics" in self._tables:
                    records.metrics.extend(_metrics(event))
            elif kind == "node_warned":
                self._node_warned(event)
            elif kind == COORDINATOR_STARTED:
                self._broken_off()
                records.attributes.clear()
                records.attributes.update(event["attributes"])
            for action in entry.actions:
                if action["type"] in RECORDS and (name := action["table"]) in self._tables:
                    rows = (record_of(TABLES[name], row) for row in rows_of(action))
                    getattr(records, name).extend(rows)
                    self._recorded(name, action)
                elif action["type"] == ATTEMPT_BEGINS:
                    self._attempt = action, entry.at_s
                elif action["type"] == "end":  # whose coordinator has recorded what was open
                    self._attempt, self._warned = None, {}
            self.held.take(entry)
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"entry {entry.number}: {error}; another version of liver_hpc wrote it"
            ) from None

    # ---- what nobody has recorded, as its coordinator was killed

    def _node_warned(self, event: dict[str, Any]) -> None:
        """As `NoticeBook.warned`, of a node that is held."""
        node, deadline_s = event["node"], event.get("deadline_s")
        allocation = self.held.allocation_of(node)
        if allocation is None:
            return
        known = self._warned.get(node)
        at_s = event["at_s"] if known is None else min(known.at_s, event["at_s"])
        deadline_s = math.nan if deadline_s is None else deadline_s
        nan = math.nan
        self._warned[node] = NoticeRecord(
            event["reason"], node, allocation, at_s, deadline_s, nan, "", -1, nan, nan, "open"
        )

    def _recorded(self, table: str, action: dict[str, Any]) -> None:
        if table == "reconfigurations":
            self._attempt = None
        elif table == "notices":
            for row in rows_of(action):
                if row["kind"] != GRANTED:
                    self._warned.pop(row["node"], None)

    def _broken_off(self) -> None:
        """Another start begins: a handoff that was under way has come to nothing, and what was
        open stays so."""
        records = self._records
        if self._attempt is not None:
            action, began_s = self._attempt
            begins = decode_attempt(action)
            notes = AttemptNotes(begins.requested, begins.notice_s, began_s)
            ended = Ended(notes.generation, "failed", BROKEN_OFF, begins.requested.source)
            done = records.steps[-1].step + 1 if records.steps else 0
            records.reconfigurations.append(notes.record(ended, math.nan, done, lambda _: ""))
        records.notices.extend(self._warned.values())
        self._attempt, self._warned = None, {}


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
