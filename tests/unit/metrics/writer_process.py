"""A process that writes metrics, to be killed, limited or read from outside.

    python -m tests.unit.metrics.writer_process endless PATH
    python -m tests.unit.metrics.writer_process full PATH BYTES recover|stay
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.config.schema import MetricsSection
from liver_hpc.metrics.store import MetricsWriter, read_run
from tests.unit.metrics.rows import reconfiguration, step

ROWS_A_FLUSH = 7


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def endless(path: Path) -> None:
    """Says after every flush how many steps are in the file, for ever."""
    settings = MetricsSection(reserve_bytes=0, flush_interval_s=3600)
    writer = MetricsWriter(path, settings, {"host": "here"})
    for number in itertools.count():
        writer.add_step(step(number))
        if number % ROWS_A_FLUSH == 0:
            writer.add_reconfiguration(reconfiguration(generation=number // ROWS_A_FLUSH))
            writer.flush()
            say(steps=number + 1, error=writer.error)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def small_disk(path: Path, free_bytes: int) -> Iterator[None]:
    """Another file takes all but `free_bytes` of the file system of `path`."""
    ballast = path.with_name("ballast")
    with ballast.open("wb", buffering=0) as file:
        block = b"\1" * 4096
        for _ in range(_free(path.parent) // 4096 - free_bytes // 4096):
            file.write(block)
    try:
        yield
    finally:
        ballast.unlink()


def _free(directory: Path) -> int:
    from liver_hpc.metrics.store import free_bytes

    return free_bytes(directory)


def full(path: Path, room_bytes: int, recovers: bool) -> None:
    """Writes until there is no room, looks at the file from inside, and goes on where it may."""
    settings = MetricsSection(reserve_bytes=0, flush_interval_s=3600)
    writer = MetricsWriter(path, settings, {"host": "here"})
    limit: Callable[[], object] = lambda: small_disk(path, room_bytes)  # noqa: E731
    if _free(path.parent) > 2**26:
        limit = lambda: file_size_limit(path.stat().st_size + room_bytes)  # noqa: E731
    numbers = itertools.count()
    with limit():  # type: ignore[attr-defined]
        while not writer.error:
            for number in itertools.islice(numbers, 50):
                writer.add_step(step(number))
            writer.flush()
        wanted = number + 1
        first_error = writer.error
        writer.flush()
        inside = [record.step for record in read_run(path).steps]
        if not recovers:
            writer.close()
    if recovers:
        writer.flush()
        after = writer.error
        writer.add_step(step(wanted))
        writer.close()
    else:
        after = writer.error
    say(error=first_error, added=wanted, inside=inside, after=after)


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    if command == "endless":
        endless(Path(where))
    else:
        full(Path(where), int(rest[0]), rest[1] == "recover")
