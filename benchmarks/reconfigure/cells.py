"""Cells that are measured: one file of rows each, so that a sweep goes on where it was cut off."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_facts, machine_kind
from benchmarks.reconfigure import live, restarts
from benchmarks.reconfigure.links import bounded
from benchmarks.reconfigure.sweep import LIVE, Cell, Sweep
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import write_whole
from liver_hpc.host.process import CORES

Row = dict[str, Any]
Facts = dict[str, str | int | float]

BEGUN, ENDED = "begun", "ended without a failure"
"""Of attempts; all others have failed, as those of tasks that were killed."""


class Rows:
    """The measured cells of a sweep in one directory, a file a cell, whole or not there; beside
    them, all attempts."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self.directory = sweep.directory / f"{sweep.name}-{sweep.fingerprint()}"

    def path(self, cell: Cell) -> Path:
        return self.directory / f"{cell.name}.json"

    def of(self, cell: Cell) -> list[Row] | None:
        """None while it is not measured."""
        found = self._read(cell)
        return None if found is None else found["rows"]

    def all_of(self, cells: Iterable[Cell]) -> list[Row]:
        """The rows of those that are measured, in the order of the cells."""
        return [row for cell in cells for row in self.of(cell) or []]

    def check_machine(self, cells: Iterable[Cell], *here: Facts) -> Facts:
        """The facts of a machine on which cells were measured, or of `here`; nothing for none.
        Raises LiverError where all of them are more than one kind of machine."""
        facts = {machine_kind(each): each for each in here}
        kinds: dict[str, list[Path]] = defaultdict(list, {kind: [] for kind in facts})
        for cell in cells:
            if (found := self._read(cell)) is not None:
                kind = machine_kind(found["machine"])
                facts.setdefault(kind, found["machine"])
                kinds[kind].append(self.path(cell))
        if len(kinds) > 1:
            mixed = "; ".join(
                f"{kind}: {', '.join(path.name for path in paths) or 'here'}"
                for kind, paths in kinds.items()
            )
            raise LiverError(
                f"{self.directory}: wanted cells of one kind of machine, got {mixed}; what files "
                "are removed is measured again"
            )
        return next(iter(facts.values()), {})

    def note(self, cell: Cell, what: str) -> None:
        """Of an attempt to measure the cell: BEGUN, then ENDED or why it has failed; who is killed
        says no more."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._attempts(cell).open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def failures(self, cells: Iterable[Cell]) -> int:
        """How many attempts to measure them have failed, also where a later one has not."""
        paths = [path for cell in cells if (path := self._attempts(cell)).exists()]
        noted = [
            json.loads(line)
            for path in paths
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        return noted.count(BEGUN) - noted.count(ENDED)

    def _attempts(self, cell: Cell) -> Path:
        return self.directory / f"{cell.name}.attempts"

    def _read(self, cell: Cell) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self.path(cell).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def keep(self, cell: Cell, rows: Sequence[Row]) -> None:
        """From here on the cell is measured."""
        self.directory.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine_facts(), "rows": rows}
        write_whole(self.path(cell), json.dumps(found, indent=1))


def measure(sweep: Sweep, cell: Cell, array: int = 0) -> None:
    """Measures one cell, in an array of so many tasks at a time or in none, and keeps its rows.
    Raises LiverError when that fails."""
    attempts = Rows(sweep)
    attempts.note(cell, BEGUN)
    try:
        with _cores(sweep), bounded(sweep, cell):
            rows = (live if cell.method == LIVE else restarts).measure(sweep, cell)
    except (ConfigError, KeyboardInterrupt):  # nothing was tried, or it is wanted no more
        attempts.note(cell, ENDED)
        raise
    except Exception as error:
        attempts.note(cell, f"{type(error).__name__}: {error}")
        raise
    where = {"variant": cell.variant, "array": array, "host": socket.gethostname()}
    Rows(sweep).keep(cell, [{**row, **where} for row in rows])
    attempts.note(cell, ENDED)


@contextlib.contextmanager
def _cores(sweep: Sweep) -> Iterator[None]:
    """What is launched inside finds the cores of which each worker takes one, if they are to be
    apart. Raises ConfigError where there are too few."""
    if sweep.cores == "shared":
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    if sweep.most_at_once > len(cores):
        raise ConfigError(f"cores apart: wanted {sweep.most_at_once} cores, got {len(cores)}")
    os.environ[CORES] = ",".join(map(str, cores[: sweep.most_at_once]))
    try:
        yield
    finally:
        del os.environ[CORES]
