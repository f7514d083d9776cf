"""What processes that are killed leave on a machine: shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until


def abandoned_files() -> set[Path]:
    """Shared memory that no living process has open.

    The semaphores of Python's multiprocessing are those of tests that play workers with it.
    """
    files = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
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
    """Fails when those that are new afterwards stay.

    Tests beside this one may leave some for a moment, and clear them up themselves.
    """
    before = abandoned_files()
    yield
    new = abandoned_files() - before
    names = ", ".join(sorted(map(str, new)))
    deadline = Deadline.after(SystemClock(), 20.0, f"abandoned files to go: {names}")
    poll_until(lambda: not new & abandoned_files(), deadline, interval_s=0.2)
