"""Entries of a journal, as trackers are told them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liver_hpc.run.entries import JOURNAL_FILE, Entry, encode

STARTED = {"type": "coordinator_started", "attributes": {"name": "toy"}}


def step_done(step: int, generation: int = 0, **fields: Any) -> dict[str, Any]:
    """Step `step`, a second long."""
    values = {"loss": 4.0 - step / 10, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 50}
    bounds = {"started_s": 100.0 + step, "ended_s": 101.0 + step}
    event = {"type": "step_done", "worker": 0, "step": step, "generation": generation}
    return {**event, **values, **bounds, **fields}


def entries(*events: Any) -> list[Entry]:
    """An event each, or a pair of an event and its actions."""
    pairs = [each if isinstance(each, tuple) else (each, []) for each in events]
    return [Entry(n, 1000.0 + n, event, actions) for n, (event, actions) in enumerate(pairs)]


def append(run_directory: Path, more: list[Entry], first: int = 0) -> None:
    """Writes entries behind those of the journal; `first` is the number of the first of them."""
    with (run_directory / JOURNAL_FILE).open("ab") as file:
        for number, entry in enumerate(more, start=first):
            file.write(encode(number, entry.at_s, entry.event, entry.actions))
