"""Records as a run's journal has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.records import TABLES, RunRecords

Events = Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]


def write_journal(run_directory: Path, records: RunRecords) -> Path:
    """A journal from which these records are read."""
    path = run_directory / JOURNAL_FILE
    lines = (encode(n, 1000.0 + n, *each) for n, each in enumerate(_events(records)))
    path.write_bytes(b"".join(lines))
    return path


def _events(records: RunRecords) -> Events:
    yield {"type": "coordinator_started", "attributes": records.attributes}, []
    for step in records.steps:
        event = {"type": "step_done", "worker": 0, **asdict(step)}
        phase = event.pop("phase")
        told = {m.name: m.value for m in records.metrics if m.step == step.step}
        event |= {"metrics": told} if told else {}
        yield event, [{"type": "step_phase", "phase": phase}] if phase else []
    for table in TABLES.keys() - {"steps", "metrics"}:
        for record in getattr(records, table):
            row = {"type": "record", "table": table, "row": asdict(record)}
            yield {"type": "heard"}, [{"type": "told", "worker": 3}, row]
