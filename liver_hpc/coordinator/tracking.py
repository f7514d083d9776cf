"""The process that follows a run for its trackers: started, woken, listened to, ended.

Neither training nor the event loop ever waits for it: it reads the journal's file, and is woken
with a byte that is dropped where it cannot be taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path

from liver_hpc.config.schema import RunConfig, TrackingSection
from liver_hpc.coordinator.performer import Services
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command, kill_at_last
from liver_hpc.host.process import quiet_thread
from liver_hpc.run.epoch import Epoch, Superseded
from liver_hpc.run.journal import Journal, JournalNews

log = logging.getLogger(__name__)

END_S = 35.0
"""So long it may take to tell the rest; a little longer than it gives itself."""

Watched = Callable[[Services], Services]
Tell = Callable[[JournalNews], None]


@contextlib.contextmanager
def tracked(
    config: RunConfig, run_directory: Path, note: Callable[[str], None]
) -> Iterator[Watched]:
    """While it lasts, the run is followed. Gives what makes services wake the process with each
    write of their journal. note: takes what goes wrong, from any thread; it stops nothing."""
    if config.tracking == TrackingSection():
        yield lambda services: services
        return
    command = Command(
        "tracking",
        [sys.executable, "-P", "-m", "liver_hpc.tracking.main", str(run_directory)],
        orphan_signal=None,  # it tells the rest, and ends: its input has ended
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        log=run_directory / "logs" / "tracking.log",
        ignored=(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1),
    )
    try:
        child = Child(command)
    except LiverError as error:
        note(f"tracking cannot be started: {error}")
        yield lambda services: services
        return
    wake = FileIO(os.dup(child.stdin.fileno()), "w")
    os.set_blocking(wake.fileno(), False)
    quiet_thread(lambda: _listen(child, note), "tracking")
    limit_s = END_S
    try:
        yield lambda services: _woken(services, wake)
    except Superseded:
        limit_s = 0.0  # it would tell what another coordinator's tells
        raise
    finally:
        wake.close()
        _end(child, limit_s)


def _listen(child: Child, note: Callable[[str], None]) -> None:
    """Passes on what it says of trackers that have failed."""
    with child.stdout as said:
        for line in said:
            log.warning("%s", line.strip())
            note(line.strip())


def _woken(services: Services, wake: FileIO) -> Services:
    """The services with a journal that wakes the process."""
    plain = services.open_journal

    def open_journal(tell: Tell, epoch: Epoch) -> Journal:
        def tell_both(told: JournalNews) -> None:
            tell(told)
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or is to
                wake.write(b"\n")

        return plain(tell_both, epoch)

    return replace(services, open_journal=open_journal)


def _end(child: Child, limit_s: float) -> None:
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        if limit_s:
            child.wait(limit_s)
    except DeadlineError as error:
        log.warning("%s; it is killed", error)
    kill_at_last(child)
