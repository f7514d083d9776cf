"""What processes that are killed leave on a machine: MPI's files, shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until


def abandoned_files() -> set[Path]:
    """Shared memory, and files of hydra's, that no living process has open."""
    files = {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("hydra_*")}
    if not files:
        return set()
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held.update(line.split()[-1] for line in (process / "maps").read_text().splitlines())
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(str(descriptor.readlink()))
    return {path for path in files if str(path) not in held}


@contextmanager
def no_abandoned_files() -> Iterator[None]:
    """Fails when there are more of them afterwards; others' runs beside this one do not count."""
    before = abandoned_files()
    yield
    deadline = Deadline.after(SystemClock(), 3.0, "abandoned files to go")
    poll_until(lambda: abandoned_files() <= before, deadline, interval_s=0.2)
