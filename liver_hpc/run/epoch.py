"""Which coordinator of a run counts: each takes the next number, and the highest is the one.

A number is a file that only one can make, also on a shared file system. It is taken before the
journal is read, and looked at again before each write to it, and after, before anything comes of
what was written. So what a coordinator acts upon, the next one has read.

One that lives touches its file every second, also while it reads what the last one has left, which
after weeks takes minutes: whoever trains on waits for it longer then. Who finds that none does
claims, by a file of its own, to start the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.errors import LiverError
from liver_hpc.host.process import quiet_thread
from liver_hpc.run.entries import JOURNAL_FILE

EPOCHS = "coordinators"
SHOWN_EVERY_S = 1.0
MISSED_AFTER = 1 / 3
"""Of the time that a run goes on without a coordinator: then somebody is to see to another one."""
REPLAYED_BYTES_PER_S = 4e6
"""At least so much of a journal is replayed in a second."""


class Superseded(LiverError):
    """Another coordinator has taken the run over, or will: this one does nothing more."""

    def __init__(self, epoch: int, by: str = "another coordinator has taken over") -> None:
        super().__init__(f"{by} from number {epoch}")


class NotTakenOver(LiverError):
    """What the coordinator before has left could not be taken over: the next one may do better, as
    whoever trains needs none of what has failed."""


@dataclass(frozen=True)
class Epoch:
    """The number of one coordinator of a run, 1 for the first. device: of its file."""

    run_directory: Path
    number: int
    device: int | None = None

    def check(self) -> None:
        """Raises Superseded where there is a later one."""
        # NFS believes for a while that a name is not there; what a directory has it asks for.
        if newest_epoch(self.run_directory) > self.number:
            raise Superseded(self.number)

    @property
    def path(self) -> Path:
        """Its file."""
        return self.run_directory / EPOCHS / str(self.number)

    def is_removed(self) -> bool:
        """Whether its file is gone, while the file system that had it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            self.path.stat()
            return False
        for path in self.path.absolute().parents:
            with suppress(FileNotFoundError):
                return path.stat().st_dev == self.device
        return False

    @property
    def removed_text(self) -> str:
        """What a run ends for then."""
        return f"its directory was removed or moved: {self.path} is gone"

    def silence_s(self) -> float:
        """How long before this one the one before it had last shown itself, by the file system's
        clock; 0.0 without one. Raises OSError."""
        before = self.path.with_name(str(self.number - 1))
        return self.path.stat().st_mtime - before.stat().st_mtime if before.exists() else 0.0

    def show(self) -> None:
        """A sign of life for who cannot reach it: to be called every `SHOWN_EVERY_S`. Raises
        OSError."""
        os.utime(self.path)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Has it shown meanwhile, while nobody can reach it yet."""
        over = threading.Event()

        def show() -> None:
            while not over.wait(SHOWN_EVERY_S):
                with suppress(OSError):  # a file system that does not answer now
                    self.show()

        quiet_thread(show, "signs of life")
        try:
            yield
        finally:
            over.set()


def replay_limit_s(run_directory: Path) -> float:
    """How long one that takes over may replay what the last one has left, beside its boot."""
    try:
        return (run_directory / JOURNAL_FILE).stat().st_size / REPLAYED_BYTES_PER_S
    except OSError:
        return 0.0


def last_sign(run_directory: Path) -> tuple[int, int] | None:
    """What is another one as long as there is a coordinator that lives, or begins; None where that
    cannot be known now."""
    try:
        newest = newest_epoch(run_directory)
        with (run_directory / EPOCHS / str(newest)).open("rb") as file:  # a stat alone may be old
            return newest, os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def claim_epoch(run_directory: Path) -> Epoch:
    """That of this coordinator, which supersedes all others. Raises LiverError where it cannot be
    written."""
    directory = run_directory / EPOCHS
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        number = newest_epoch(run_directory) + 1
        while True:
            try:
                path = directory / str(number)
                path.touch(0o600, exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return Epoch(run_directory, number, path.stat().st_dev)
    except OSError as error:
        raise LiverError(f"{directory}: {error.strerror}") from error


def claim_succession(run_directory: Path, attempt: int) -> bool:
    """Whether the caller is the one to start what comes after the newest coordinator, which is
    gone: at each attempt one is. Raises LiverError where that cannot be written."""
    path = run_directory / EPOCHS / f"after-{newest_epoch(run_directory)}-{attempt}"
    try:
        path.touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise LiverError(f"{path}: {error.strerror}") from error
    return True


def newest_epoch(run_directory: Path) -> int:
    """The number of the newest coordinator; 0 before there was one."""
    try:
        made = [path.name for path in (run_directory / EPOCHS).iterdir()]
    except FileNotFoundError:
        return 0
    return max((int(name) for name in made if name.isdigit()), default=0)
