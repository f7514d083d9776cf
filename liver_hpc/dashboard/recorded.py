"""What is recorded of a run already, as the page shows it: the report's own words, tables and
figures, and each attempt's lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.page.parts import handoff_facts, handoff_line, table, terms, verdict
from liver_hpc.report.tables import remarks, sheets, summary_lines
from liver_hpc.report.worlds import first_known
from liver_hpc.run.records import RunRecords, WorkerPhaseRecord

MOST_ROWS = 40
"""Of a table: the newest; `liver report` has them all."""
MOST_DRAWN = 8
"""Handoffs with lanes: the newest."""
MOST_LANES = 48
MOST_MARKS = 200
"""Handoffs that the curve shows: the newest."""

Since = Callable[[float], float | None]
"""A point in time as the page counts it; None where it is not known."""


def parts(records: RunRecords, figures: RunFigures, since: Since) -> dict[str, Any]:
    """The parts of the page that the records make, by their names."""
    drawn = figures.reconfigurations[-MOST_DRAWN:]
    of_attempt: dict[int, list[WorkerPhaseRecord]] = {each.generation: [] for each in drawn}
    for row in records.worker_phases:
        if row.generation in of_attempt:
            of_attempt[row.generation].append(row)
    return {
        "verdict": _html(lambda parent: verdict(parent, figures)),
        "tables": _html(lambda parent: _tables(parent, records, figures)),
        "marks": [_mark(each, since) for each in figures.reconfigurations[-MOST_MARKS:]],
        "handoffs": [_handoff(each, of_attempt[each.generation], since) for each in drawn[::-1]],
    }


def lanes(
    phases: Sequence[WorkerPhaseRecord], source: Sequence[int], target: Sequence[int], since: Since
) -> list[dict[str, Any]]:
    """A lane for each worker; of very many, of those that took part the longest. An end that is not
    known is None."""
    own: dict[int, list[WorkerPhaseRecord]] = {worker: [] for worker in source}
    for row in phases:
        own.setdefault(row.worker, []).append(row)
    longest = sorted(own, key=lambda worker: _last_end_s(own[worker]), reverse=True)
    return [
        {
            "worker": worker,
            "role": "joins" if worker not in source else "leaves" if worker not in target else "",
            "node": own[worker][0].node if own[worker] else "",
            "phases": [[r.phase, since(r.started_s), since(r.ended_s)] for r in own[worker]],
        }
        for worker in sorted(longest[:MOST_LANES])
    ]


def _last_end_s(phases: Sequence[WorkerPhaseRecord]) -> float:
    """One that has not ended is the last."""
    ends_s = (row.ended_s if math.isfinite(row.ended_s) else math.inf for row in phases)
    return max(ends_s, default=-math.inf)


def _mark(record: ReconfigurationFigures, since: Since) -> dict[str, Any]:
    at_s = first_known(record.source_last_step_ended_s, record.prepare_started_s, record.notice_s)
    return {
        "generation": record.generation,
        "completed": record.completed,
        "at": since(at_s),
        "phases": _phases(record, since),
    }


def _handoff(
    record: ReconfigurationFigures, phases: Sequence[WorkerPhaseRecord], since: Since
) -> dict[str, Any]:
    source, target = (_ids(each) for each in (record.source_workers, record.target_workers))
    boundary_s = first_known(record.source_last_step_ended_s, record.armed_s)
    return {
        "generation": record.generation,
        "line": _html(lambda parent: handoff_line(parent, record)),
        "facts": " \u00b7 ".join(handoff_facts(record)),
        "boundary": since(boundary_s),
        "phases": _phases(record, since),
        "lanes": lanes(phases, source, target or source, since),
    }


def _phases(record: ReconfigurationFigures, since: Since) -> list[Any]:
    """As far as they were reached."""
    edges = [
        ("BOOT", record.boot_ended_s - record.phases.boot_s),
        ("PREPARE", record.prepare_started_s),
        ("BOUNDARY", record.prepare_ended_s),
        ("TRANSFER", record.source_last_step_ended_s),
        ("COMMIT", record.transfer_ended_s),
        ("RELEASE", record.committed_s),
        ("", record.released_s),
    ]
    known = [(name, since(at_s)) for name, at_s in edges if math.isfinite(at_s)]
    return [[name, begin, end] for (name, begin), (_, end) in pairwise(known)]


def _ids(workers: str) -> list[int]:
    return [int(worker) for worker in workers.split(",") if worker]


def _tables(parent: Element, records: RunRecords, figures: RunFigures) -> None:
    terms(SubElement(parent, "dl"), summary_lines(figures, records))
    newest = replace(
        figures,
        generations=figures.generations[-MOST_ROWS:],
        reconfigurations=figures.reconfigurations[-MOST_ROWS:],
        recoveries=figures.recoveries[-MOST_ROWS:],
        notices=figures.notices[-MOST_ROWS:],
    )
    for sheet in sheets(newest, records):
        table(parent, sheet)
    notes = [note.text for note in remarks(newest)]
    most = max(map(len, (figures.generations, figures.reconfigurations, figures.notices)))
    if most > MOST_ROWS:
        notes.append(f"Tables show the newest {MOST_ROWS} rows; `liver report` has all.")
    for note in notes:
        SubElement(parent, "p", {"class": "note"}).text = note


def _html(fill: Callable[[Element], None]) -> str:
    """What is put into an element, as text for the page."""
    parent = Element("div")
    fill(parent)
    return tostring(parent, encoding="unicode", method="html")
