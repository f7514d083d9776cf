"""A process that writes metrics, to be killed, read, or left without room from outside.

python -m tests.unit.report.writer_process endless PATH
python -m tests.unit.report.writer_process limit|disk PATH recover|stay
python -m tests.unit.report.writer_process close PATH
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.config.schema import MetricsSection
from liver_hpc.report.store import MetricsWriter, free_bytes, read_run
from tests.unit.report.rows import reconfiguration, step

STEPS_A_FLUSH = 7
ROOM_BYTES = 80_000
SETTINGS = MetricsSection(reserve_bytes=0, flush_interval_s=3600)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def endless(path: Path) -> None:
    """Says after every flush how many steps are in the file, for ever."""
    writer = MetricsWriter(path, SETTINGS, {"host": "here"})
    for number in itertools.count():
        writer.add_step(step(number))
        if number % STEPS_A_FLUSH == 0:
            writer.add_reconfiguration(reconfiguration(generation=number // STEPS_A_FLUSH))
            writer.flush()
            say(steps=number + 1, error=writer.error)


@contextmanager
def limit(path: Path, room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """No file may become larger than `path` is, but for `room_bytes`."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Another file takes the whole file system of `path`, but for ROOM_BYTES."""
    ballast = path.with_name("ballast")
    ballast.write_bytes(b"\1" * (free_bytes(path.parent) - ROOM_BYTES))
    try:
        yield
    finally:
        ballast.unlink()


def until_full(path: Path, no_room: str, recovers: bool) -> None:
    """Writes until there is no room, looks at the file from inside, and goes on where it may."""
    writer = MetricsWriter(path, SETTINGS, {"host": "here"})
    added = 0
    with {"limit": limit, "disk": disk}[no_room](path):
        while not writer.error:
            for number in range(added, added + 50):
                writer.add_step(step(number))
            added += 50
            writer.flush()
        error = writer.error
        writer.flush()
        inside = len(read_run(path).steps)
        if not recovers:
            writer.close()
    if recovers:
        writer.add_reconfiguration(reconfiguration())
        writer.flush()
        writer.add_step(step(added))
        writer.close()
    say(error=error, added=added, inside=inside, at_end=writer.error)


def close_without_disk(path: Path) -> None:
    """The disk takes nothing any more, not even in the place of what is there."""
    writer = MetricsWriter(path, SETTINGS, {"host": "here"})
    writer.add_step(step(0))
    writer.flush()
    with limit(path, 10 - path.stat().st_size):
        writer.close()
    say(error=writer.error)


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    if command == "endless":
        endless(Path(where))
    elif command == "close":
        close_without_disk(Path(where))
    else:
        until_full(Path(where), command, rest == ["recover"])
