"""`liver events`: what happened in a run, line by line, from its journal."""

from __future__ import annotations

import json
import time

from liver_hpc.cli.following import Following
from liver_hpc.errors import ConfigError
from liver_hpc.report.events import RunEvent, events_of
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, read_entries


def show_events(run: RunDirectory, since: int, as_json: bool, follow: bool) -> None:
    """Prints what came once `since` steps were done; with `follow` also what comes, until the run
    ends. Raises ConfigError where nothing has been recorded, and for a damaged journal."""
    journal = run.path / JOURNAL_FILE
    following = Following(run, journal) if follow else None
    while following is not None and not journal.exists():
        if not following():
            break
    if not journal.exists():
        raise ConfigError(f"run {run} has no {JOURNAL_FILE}: nothing was recorded yet")
    for event in events_of(read_entries(journal, following)):
        if event.step >= since:
            print(json.dumps(event.document()) if as_json else _line(event), flush=follow)


def _line(event: RunEvent) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_s))
    return f"{when}  step {event.step:<6}  {event.text}"
