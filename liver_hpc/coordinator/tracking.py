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
from functools import partial
from io import FileIO
from pathlib import Path

from liver_hpc.config.schema import RunConfig, TrackingSection
from liver_hpc.coordinator.performer import Services
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command, kill_at_last
from liver_hpc.host.process import quiet_thread
from liver_hpc.run.epoch import Epoch, Superseded
from liver_hpc.run.journal import Journal, JournalNews
from liver_hpc.tracking.base import HAS_FAILED

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
    process = _Process(run_directory, note)
    limit_s = END_S
    try:
        yield process.woken
    except Superseded:
        limit_s = 0.0  # it would tell what another coordinator's tells
        raise
    finally:
        process.end(limit_s)


class _Process:
    """The process, and after it failed, or a tracker in it, another one from the next start on."""

    def __init__(self, run_directory: Path, note: Callable[[str], None]) -> None:
        self._run_directory = run_directory
        self._note = note
        self._wake: FileIO | None = None
        self._begin()

    def woken(self, services: Services) -> Services:
        """The services with a journal that wakes the process."""
        if self._failed:
            if self._wake is not None:
                self._wake.close()
                # It may tell the rest for long; the next one waits for that.
                try:
                    quiet_thread(partial(_end, self._child, END_S), "tracking's end")
                except LiverError as error:
                    log.warning("%s: the next one tells the rest", error)
                    _end(self._child, 0.0)
            self._begin()
        wake, plain = self._wake, services.open_journal
        if wake is None:
            return services

        def open_journal(tell: Tell, epoch: Epoch) -> Journal:
            def tell_both(told: JournalNews) -> None:
                tell(told)
                with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or is to
                    wake.write(b"\n")

            return plain(tell_both, epoch)

        return replace(services, open_journal=open_journal)

    def end(self, limit_s: float) -> None:
        """Has it tell the rest; kills it after `limit_s`."""
        if self._wake is not None:
            self._wake.close()
            _end(self._child, limit_s)

    def _begin(self) -> None:
        self._failed, self._wake = False, None
        command = Command(
            "tracking",
            [sys.executable, "-P", "-m", "liver_hpc.tracking.main", str(self._run_directory)],
            orphan_signal=None,  # it tells the rest, and ends: its input has ended
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            log=self._run_directory / "logs" / "tracking.log",
            ignored=(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1),
        )
        try:
            self._child = child = Child(command)
        except LiverError as error:
            self._failed = True
            self._note(f"tracking cannot be started: {error}")
            return
        self._wake = wake = FileIO(os.dup(child.stdin.fileno()), "w")
        os.set_blocking(wake.fileno(), False)
        try:
            quiet_thread(partial(self._listen, child, wake), "tracking")
        except LiverError as error:
            self._noted(f"what tracking says of its trackers is not heard: {error}", wake)

    def _listen(self, child: Child, wake: FileIO) -> None:
        """Passes on what it says of trackers that have failed, and its end where nobody wants it
        to end."""
        text = ""
        with child.stdout as said:
            for line in said:
                text = line.strip()
                self._noted(text, wake)
        if not wake.closed and not text.startswith(HAS_FAILED):
            with contextlib.suppress(DeadlineError):
                child.wait(END_S)
            how = child.how()
            self._noted(f"tracking has ended ({how}): trackers are told no more", wake)

    def _noted(self, text: str, wake: FileIO) -> None:
        log.warning("%s", text)
        self._failed |= not wake.closed
        self._note(text)


def _end(child: Child, limit_s: float) -> None:
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        if limit_s:
            child.wait(limit_s)
    except DeadlineError as error:
        log.warning("%s; it is killed", error)
    kill_at_last(child)
