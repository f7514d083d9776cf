"""The journal of a run: every event that the coordinator took in, and what came of it, in order.

What an entry looks like stands in `entries.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

from liver_hpc.errors import LiverError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.host.process import quiet_thread
from liver_hpc.run.entries import Event, decode, encode, find_last, torn_text
from liver_hpc.run.epoch import Epoch, Superseded
from liver_hpc.run.events import JournalFailed

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""So long after a failed write comes the next."""
RESERVE_BYTES = 16 * 2**20
"""So much of the disk is left to what else must be written."""
_COPY_BYTES = 2**20


@dataclass(frozen=True)
class Written:
    """All entries up to `number` are on the disk."""

    number: int


JournalNews = Written | JournalFailed | Superseded
"""What a coordinator hears of its journal."""


class Journal:
    """Takes entries in any thread, and says when they are safe. A thread writes all that waits with
    one write and one fsync, and tells the highest number that is on the disk.

    Where the disk has less than `reserve_bytes` free, or a write fails, `JournalFailed` is told
    once; entries wait in memory, and every second is another attempt. `tell` is called in the
    writer's thread. Where a later coordinator than `epoch` has taken the run over, that is told as
    Superseded, and nothing else any more.

    error: why entries cannot be written now; empty while they can.
    """

    def __init__(
        self,
        path: Path,
        tell: Callable[[JournalNews], None],
        epoch: Epoch,
        reserve_bytes: int = RESERVE_BYTES,
        free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """Goes on with the file at `path`, or makes it (mode 0600).

        Raises ConfigError where its last line is damaged, LiverError where it cannot be opened, or
        there is no thread to write it.
        """
        self._path = path
        self._tell = tell
        self._reserve_bytes = reserve_bytes
        self._epoch = epoch
        self._free = free
        self._end_bytes, self._next = _open(path)
        self._may_be_torn = False
        self._waiting: list[tuple[int, bytes]] = []  # entries' numbers and lines
        self._changed = threading.Condition()
        self._closing = False
        self.error = ""
        self._thread = quiet_thread(self._write_what_comes, "journal")

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        """Takes an entry, and returns its number; never waits for the disk."""
        with self._changed:
            if self._closing:
                raise LiverError(f"{self._path} is closed: {event.get('type')} came too late")
            number = self._next
            self._waiting.append((number, encode(number, at_s, event, actions, said)))
            self._next += 1
            self._changed.notify_all()
        return number

    def close(self, limit_s: float) -> None:
        """Writes what waits, in `limit_s` at most; what cannot be written is lost, and `error` says
        so. Afterwards `append` raises LiverError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self.error = f"{self._path}: waited {limit_s:g} s for the disk to take the last entries"
            log.warning("%s", self.error)

    # ---- in the writer's thread

    def _write_what_comes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                closing = self._closing
                batch, self._waiting = self._waiting, []
            try:
                if batch:
                    self._write(b"".join(line for _, line in batch))
                    if not self._is_ours():
                        return
            except Superseded as superseded:
                self._tell(superseded)
                return
            except (OSError, LiverError) as error:
                with self._changed:
                    self._waiting = batch + self._waiting
                self._failed(error)
                if not closing:
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing, RETRY_S)
                    continue
            else:
                if batch:
                    if self.error:
                        log.warning("%s can be written again", self._path)
                    self.error = ""
                    self._tell(Written(batch[-1][0]))
            if closing:
                return

    def _write(self, data: bytes) -> None:
        """Puts whole lines behind the others, onto the disk."""
        wanted, got = self._reserve_bytes, self._free(self._path.parent)
        if got < wanted:
            raise LiverError(f"the disk is full: wanted {wanted} bytes free, got {got}")
        with FileIO(self._path, "r+") as file:
            self._epoch.check()  # the next one's file would be in its place by now
            size_bytes = os.fstat(file.fileno()).st_size
            if self._may_be_torn and size_bytes > self._end_bytes:
                file.truncate(self._end_bytes)
            elif size_bytes != self._end_bytes:
                raise LiverError(
                    f"wanted {self._end_bytes} bytes in it, got {size_bytes}: "
                    "another process has written to it or cut it"
                )
            file.seek(self._end_bytes)
            self._may_be_torn = True
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        self._may_be_torn = False
        self._end_bytes += len(data)

    def _is_ours(self) -> bool:
        """Whether what was written just now is this coordinator's to act upon. Asks again until it
        is known: what is written is not written again. False where it is not known at the end;
        raises Superseded."""
        while True:
            try:
                self._epoch.check()
                return True
            except OSError as error:
                self._failed(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, RETRY_S):
                    return False

    def _failed(self, error: Exception) -> None:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        is_first = not self.error
        self.error = f"{self._path}: {reason}; {len(self._waiting)} entries wait in memory"
        if is_first:
            log.warning("%s", self.error)
            self._tell(JournalFailed(reason))


def continue_in_copy(path: Path, epoch: Epoch) -> None:
    """Puts a copy in the journal's place, before the coordinator of `epoch` reads it: what one
    before it writes late goes to the file that this one has open, and nowhere else.

    It ends at the first hole. No line has a zero: what one write gave to a file system of the
    network goes there in parts, side by side, and where a node is lost a later part may have come
    alone. Nothing of that was told as written.

    Where there is no room for a copy the log says so, and the file stays. Raises Superseded.
    """
    copy = path.with_name(f".{path.name}.{epoch.number}")
    try:
        with path.open("rb") as source, open(_opened(copy, os.O_TRUNC), "wb") as target:
            while data := source.read(_COPY_BYTES):
                whole, hole, _ = data.partition(b"\0")
                target.write(whole)
                if hole:
                    warning = "%s has a hole at byte %d, and is gone on with up to there"
                    log.warning(warning, path, target.tell())
                    break
            target.flush()
            os.fsync(target.fileno())
        epoch.check()  # else it would take the place of a later one's
        copy.replace(path)
        flush_to_disk(path.parent)
    except FileNotFoundError:
        pass  # there is no journal yet
    except OSError as error:
        log.warning("%s cannot be copied, and is gone on with as it is: %s", path, error.strerror)
    finally:
        with suppress(OSError):
            copy.unlink(missing_ok=True)


def _opened(path: Path, flags: int = 0) -> int:
    """A descriptor of the file, which is made (mode 0600) where there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)


def _open(path: Path) -> tuple[int, int]:
    """Makes the file or cuts off its torn last line; its size in bytes, and the next number."""
    try:
        with open(_opened(path), "r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            end_bytes, last = _last_line(file, size_bytes)
            if end_bytes < size_bytes:
                log.warning("%s: %s", path, torn_text(size_bytes - end_bytes))
                file.truncate(end_bytes)
            os.fsync(file.fileno())
        flush_to_disk(path.parent)
    except OSError as error:
        raise LiverError(f"{path} cannot be written: {error.strerror}") from error
    if not last:
        return end_bytes, 0
    (entry,) = decode([last], f"{path}, last line:")
    return end_bytes, entry.number + 1


def _last_line(file: IO[bytes], size_bytes: int) -> tuple[int, bytes]:
    """Where the last whole line ends, and that line; 0 and nothing without one."""
    end_bytes = find_last(file, b"\n", size_bytes) + 1
    begin_bytes = find_last(file, b"\n", max(end_bytes - 1, 0)) + 1
    file.seek(begin_bytes)
    return end_bytes, file.read(end_bytes - begin_bytes)
