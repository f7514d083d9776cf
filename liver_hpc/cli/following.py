"""A run's file that grows, followed to the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from liver_hpc.cli.client import coordinator_lives
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.run_job import job_of
from liver_hpc.run.directory import RunDirectory

LOOK_S = 0.2
"""How often a file is looked at."""
_LIVES_S = 2.0
"""How often who coordinates is looked for."""


class Following:
    """Waits for a file of a run to grow, until the run is over.

    Used as `read_entries` wants it: called at the file's end, says whether there may be more.
    """

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run = run
        self._path = path
        self._job = job_of(run)
        self._lives_s = _LIVES_S if self._job is None else run.config().cluster.slurm.poll_s
        self._clock = SystemClock()
        self._asked_s = -math.inf
        self._size_bytes = -1
        self._is_over = False

    def __call__(self) -> bool:
        """Returns once the file has grown, or the run has ended; False at the end that was read
        once the run had ended. Has no deadline: a run may train for weeks without a line."""
        if self._is_over:
            return False
        forever = Deadline.after(self._clock, math.inf, f"{self._path} to grow")
        poll_until(self._may_have_more, forever, LOOK_S)
        return True

    def _may_have_more(self) -> bool:
        self._is_over = self._has_ended()
        before, self._size_bytes = self._size_bytes, _size_bytes(self._path)
        return self._is_over or self._size_bytes != before

    def _has_ended(self) -> bool:
        """Whether there is an outcome, or nobody is left to write one. A run that waits in Slurm's
        queue has not ended."""
        if self._run.outcome() is not None:
            return True
        now_s = self._clock.now_s()
        if now_s - self._asked_s < self._lives_s:
            return False
        self._asked_s = now_s
        if self._job is not None:
            return self._job.is_over()
        return not coordinator_lives(self._run)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def lines_of(path: Path, following: Following | None) -> Iterator[str]:
    """The lines of a file that is written by one process after the other; where one has put
    another file in its place, that one's too."""
    offset, number = 0, -1
    while True:
        rest = b""
        try:
            with path.open("rb") as file:
                status = path.stat()
                if status.st_ino != number or status.st_size < offset:
                    offset, number = 0, status.st_ino
                file.seek(offset)
                while line := file.readline():
                    if not line.endswith(b"\n") and following is not None:
                        rest = line  # more of it comes
                        break
                    offset = file.tell()
                    yield line.decode(errors="replace").rstrip("\n")
        except FileNotFoundError:
            pass
        if following is None or not following():
            if rest:
                yield rest.decode(errors="replace")
            return
