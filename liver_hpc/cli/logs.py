"""`liver logs`: what the coordinator, an agent or a worker has logged."""

from __future__ import annotations

import itertools
from pathlib import Path

from liver_hpc.cli.following import Following, lines_of
from liver_hpc.errors import ConfigError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, read_entries

COORDINATOR_LOG = "coordinator.log"


def show_log(run: RunDirectory, worker: int | None, agent: str | None, follow: bool) -> None:
    """Prints one log: of the run's coordinators one after the other, of a worker by its id, or of
    an agent by its name. With `follow` what comes too, until the run ends.

    Raises ConfigError for a worker or an agent of which there is none.
    """
    if worker is not None:
        path = run.path / "logs" / _workers_log(run, worker)
    elif agent is not None:
        path = _agents_log(run, agent)
    else:
        path = run.path / "logs" / COORDINATOR_LOG
    if not follow and not path.exists():
        raise ConfigError(f"run {run} has no {path.relative_to(run.path)} yet")
    for line in lines_of(path, Following(run, path) if follow else None):
        print(line, flush=follow)


def _workers_log(run: RunDirectory, worker: int) -> str:
    """The journal has who was admitted under which ids, and a log's name who started it. Each start
    of a run counts from 0: the newest one's is meant."""
    known: dict[int, str] = {}
    journal = run.path / JOURNAL_FILE
    for entry in read_entries(journal) if journal.exists() else ():
        for action in entry.actions:
            if action["type"] == "admit":
                names = (f"worker-{action['agent']}-{index}.log" for index in itertools.count())
                known.update(zip(action["workers"], names, strict=False))
    if worker in known:
        return known[worker]
    which = f"workers of the run are {sorted(known)}" if known else "no worker has come yet"
    raise ConfigError(f"run {run} has had no worker {worker}; {which}")


def _agents_log(run: RunDirectory, agent: str) -> Path:
    names = sorted(
        path.stem.removeprefix("agent-") for path in (run.path / "logs").glob("agent-*.log")
    )
    if agent not in names:
        which = f"agents of the run are {', '.join(names)}" if names else "none has started yet"
        raise ConfigError(f"run {run} has had no agent {agent!r}; {which}")
    return run.path / "logs" / f"agent-{agent}.log"
