"""`python -m liver_hpc.tracking.main DIR`: the process that follows a run, for its coordinator.

It reads the journal whenever a byte comes over standard input, and ends once that is closed. What
goes wrong with a tracker is a line on standard output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from liver_hpc.clock import Clock, Deadline, SystemClock
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.files import file_lock, write_whole
from liver_hpc.host.process import quiet_thread
from liver_hpc.report.derive import RunFigures, run_figures
from liver_hpc.run.entries import JOURNAL_FILE, Entry, JournalReader, JournalUnread
from liver_hpc.run.outcome import open_log, write_private_json
from liver_hpc.tracking.base import HAS_FAILED, SHARE, Mark, Point, Tracker, wanted_by
from liver_hpc.tracking.course import Course

log = logging.getLogger(__name__)

DIRECTORY = "tracking"
"""In the run directory: how far each tracker has come, and what is its own."""
GATHER_S = 0.5
"""So long after a byte the journal is read: what comes meanwhile is read with it."""
UNREAD_S, AGAIN_S = 600.0, 2.0
"""So long a journal that cannot be read is tried again, and after how long each time."""
CLOSE_S = 30.0
"""So long it may live once nobody wants it any more: a tracker may have to send."""
GOODPUT_S = 30.0
"""So often, at the most, the goodput is derived for trackers; and at the end, unless it takes long.
"""
LOCKED_S = 2 * CLOSE_S
"""So long the process before is waited for: if it lives it has ended by then."""


class Stands(NamedTuple):
    """How far a tracker was told of the journal that began at `journal_s`: up to an entry, with so
    many steps done then, the last one at that place (`Course`)."""

    journal_s: float = 0.0
    entry: int = -1
    step: int = 0
    place: int = 0


class Following:
    """A run's journal, told to its trackers. Each goes on where the file of its name in
    `tracking/` says: no entry is told twice but those that it had not confirmed."""

    def __init__(self, run_directory: Path, config: RunConfig, say: Callable[[str], None]) -> None:
        self._run_directory = run_directory
        self._directory = run_directory / DIRECTORY
        self._config = config
        self._say = say
        self._journal = run_directory / JOURNAL_FILE
        self._reader = JournalReader(self._journal)
        self._course = Course()
        self._lock = threading.Lock()  # of the course
        self._clock: Clock = SystemClock()
        self._last = -1
        self._journal_s = 0.0
        self._trackers: dict[str, Tracker] = {}
        self._wanted = wanted_by(config.tracking)
        self._next_s = self._clock.now_s() + GOODPUT_S
        self._took_s = 0.0  # to derive the figures, the last time
        self._run_id = ""

    def figures(self) -> RunFigures:
        """As of now; from any thread."""
        with self._lock:
            return run_figures(self._course.fold.records)

    def now(self) -> Mapping[str, float]:
        """See `Course`; from any thread."""
        with self._lock:
            return self._course.now

    def open(self) -> None:
        """Reads the journal up to now, and opens each tracker where it stands."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._run_id = _run_id(self._directory, self._config.name)
        stands = {name: _read(_stands(self._directory, name)) for name in self._wanted}
        marks: list[Mark] = []
        closed = [*self._wanted]

        def open_at(name: str) -> None:
            closed.remove(name)
            self._do(name, partial(self._open, name, [*marks], stands[name]))

        for entry in self._new_entries():
            for what in self._taken(entry):
                for name in self._wanted:
                    if entry.number > self._come(stands[name]):
                        if name in closed:
                            open_at(name)
                        self._tell(name, what)
                if isinstance(what, Mark):
                    marks.append(what)
        for name in [*closed]:
            open_at(name)
        self._confirm()

    def look(self, last: bool = False) -> None:
        """Tells what has come since."""
        for entry in self._new_entries():
            for what in self._taken(entry):
                for name in [*self._trackers]:
                    self._tell(name, what)
        now_s = self._clock.now_s()
        # At the end only where that leaves time for trackers to send.
        if self._trackers and (self._took_s < CLOSE_S / 4 if last else now_s >= self._next_s):
            goodput = self.figures().goodput
            derived_s = self._clock.now_s()
            self._took_s = derived_s - now_s
            self._next_s = derived_s + max(GOODPUT_S, SHARE * self._took_s)
            if goodput == goodput:
                point = Point(self._course.step, now_s, {"run/goodput": goodput})
                for name in [*self._trackers]:
                    self._tell(name, point)
        self._confirm()

    def close(self) -> None:
        for name in [*self._trackers]:
            self._do(name, self._trackers[name].close)

    def _new_entries(self) -> Iterator[Entry]:
        """Of a journal that is not there yet none. Raises JournalUnread, OSError."""
        while entries := self._more():
            yield from entries

    def _more(self) -> list[Entry]:
        """Where its file system does not give it just now it is asked again, for a while: else
        nobody would be told of the rest of the run."""
        limit = Deadline.after(self._clock, UNREAD_S, "the journal")
        while True:
            try:
                return self._reader.more() if self._journal.exists() else []
            except (JournalUnread, OSError) as error:
                if limit.expired():
                    raise
                log.warning("the journal is read again: %s", error)
                threading.Event().wait(AGAIN_S)

    # ---- one tracker

    def _come(self, stands: Stands) -> int:
        """The last entry that a tracker was told of; of a damaged journal, which was set aside and
        another one begun, none."""
        return stands.entry if stands.journal_s == self._journal_s else -1

    def _open(self, name: str, told: list[Mark], stands: Stands) -> None:
        section = getattr(self._config.tracking, name)
        match name:
            case "tensorboard":
                from liver_hpc.tracking.tensorboard import TensorBoard

                path = self._run_directory / "tensorboard"
                if section.directory is not None:  # other runs may write there, too
                    path = section.directory / self._run_directory.name
                self._trackers[name] = TensorBoard(path, told, stands.step, self._clock.now_s())
            case "wandb":
                # To W&B itself, also where the server is another one; read in the import.
                os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
                from liver_hpc.tracking.weights_and_biases import WeightsAndBiases

                facts = {"run_directory": self._run_directory.name, "name": self._config.name}
                at = stands.step, stands.place
                self._trackers[name] = WeightsAndBiases(
                    section, self._directory, self._run_id, facts, told, at
                )
            case _:
                from liver_hpc.tracking.openmetrics import OpenMetrics

                self._trackers[name] = OpenMetrics(
                    section, self._directory, self._run_directory.name, self.figures, self.now
                )

    def _tell(self, name: str, what: Point | Mark) -> None:
        if name in self._trackers:
            tracker = self._trackers[name]
            self._do(name, lambda: tracker.take(what))

    def _confirm(self) -> None:
        """Flushes, and notes how far each has come."""
        for name in [*self._trackers]:
            self._do(name, self._trackers[name].flush)
        course = self._course
        stands = Stands(self._journal_s, self._last, course.step, course.place)
        try:
            for name, tracker in self._trackers.items():
                if tracker.keeps:
                    write_private_json(_stands(self._directory, name), stands._asdict())
        except OSError as error:  # what is not noted is told again after a start
            log.warning("%s: %s", error.filename, error.strerror)

    def _do(self, name: str, work: Callable[[], None]) -> None:
        """What a library raises is nobody's concern but its tracker's, which is told of no more."""
        try:
            work()
        except Exception as error:
            log.exception("tracking.%s", name)
            self._trackers.pop(name, None)
            self._say(f"tracking.{name} has failed: {type(error).__name__}: {error}")

    def _taken(self, entry: Entry) -> list[Point | Mark]:
        with self._lock:
            found = [*self._course.take(entry)]
        if entry.number == 0:
            self._journal_s = entry.at_s
        self._last = entry.number
        return found


def _run_id(directory: Path, name: str) -> str:
    """That of the run, for as long as its directory lives."""
    path = directory / "run-id"
    if not path.exists():
        write_whole(path, f"{name}-{secrets.token_hex(4)}\n", mode=0o600, sync=True)
    return path.read_text(encoding="utf-8").strip()


def _stands(directory: Path, name: str) -> Path:
    """What says how far a tracker has come."""
    return directory / f"{name}-stands.json"


def _read(path: Path) -> Stands:
    try:
        return Stands(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Stands()


def follow(run_directory: Path, wake: int, say: Callable[[str], None]) -> None:
    """Until the other end of the descriptor `wake` is closed. One process of a run at a time: the
    one before may still be about to end."""
    quiet_thread(partial(_die_in_time, wake), "end")
    following = Following(run_directory, load_run(run_directory / "run.yaml"), say)
    gathers = threading.Event()
    (run_directory / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(run_directory / DIRECTORY / "lock", LOCKED_S))
        except DeadlineError as error:  # NFSv3 keeps the locks of a host that is lost
            log.warning("%s; its host is taken for lost", error)
        following.open()
        while os.read(wake, 2**16):
            gathers.wait(GATHER_S)
            following.look()
        following.look(last=True)
        following.close()


def _die_in_time(wake: int) -> None:
    """Also where a tracker stands still, and whoever would kill this process was killed."""
    ends = select.poll()
    ends.register(wake, 0)  # that the other end is closed is told always
    ends.poll()
    signal.setitimer(signal.ITIMER_REAL, CLOSE_S)  # of which it dies


def main(arguments: Sequence[str] | None = None) -> int:
    (directory,) = sys.argv[1:] if arguments is None else arguments
    run_directory = Path(directory)
    handler = open_log(run_directory / "logs" / "tracking.log", lambda: "tracking")
    package = logging.getLogger("liver_hpc")
    package.addHandler(handler)
    package.setLevel(logging.INFO)

    def say(text: str) -> None:
        print(" ".join(text.split()), flush=True)

    try:
        follow(run_directory, sys.stdin.fileno(), say)
    except (LiverError, OSError) as error:
        log.exception("tracking ends")
        say(f"{HAS_FAILED}{error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
