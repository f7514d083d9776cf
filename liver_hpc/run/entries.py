"""The entries of a journal: one line of JSON each, in the file `journal.jsonl`.

    {"n":17,"t":1763.125,"event":{"type":...},"actions":[{"type":...}],"crc":"1a2b3c4d"}

n counts the entries from 0 over all restarts of the run; t is in epoch seconds; "actions" is left
out where there are none; "said" is the number of a worker's message among all of that worker's;
crc is the CRC-32, in hex, of the line's bytes before `,"crc":`. A float that is not finite is the
string "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

from pydantic_core import from_json, to_json

from liver_hpc.errors import ConfigError

log = logging.getLogger(__name__)

JOURNAL_FILE = "journal.jsonl"
COORDINATOR_STARTED = "coordinator_started"
STEP_DONE = "step_done"

_READ_BYTES = 2**20
_LOOK_BYTES = 2**18
_CRC_BYTES = len(b',"crc":"1a2b3c4d"}\n')

Event = Mapping[str, Any]


class JournalUnread(ConfigError):
    """A file system does not give a journal just now: it may be whole."""


class Entry(NamedTuple):
    """One event at `at_s` (epoch seconds) and the actions that followed from it. said: its number
    among the messages of the worker whose words it is."""

    number: int
    at_s: float
    event: dict[str, Any]
    actions: list[dict[str, Any]]
    said: int = 0


def encode(
    number: int, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
) -> bytes:
    """The entry's line. Raises ValueError for what JSON does not know."""
    document: dict[str, Any] = {"n": number, "t": at_s, "event": event}
    if actions:
        document["actions"] = actions
    if said:
        document["said"] = said
    body = to_json(document, inf_nan_mode="strings")[:-1]
    return b'%s,"crc":"%08x"}\n' % (body, crc32(body))


class JournalReader:
    """Reads a journal from its beginning on, or from the line that begins at a byte, as far as it
    has been written, and goes on from there whenever it is asked for more. Where the line that was
    read last is not there any more, the journal was begun anew: it is read from its beginning.

    read_bytes: where the whole lines that have been read end. torn_bytes: how many followed the
    last of them; they are read once their line is whole.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path = path
        self._lines = 0
        self._last = b""
        self._following = None if begin else 0
        self._where = f"{path}, line" if begin == 0 else f"{path}, from byte {begin} on, line"
        self.read_bytes = begin
        self.torn_bytes = 0

    def more(self) -> list[Entry]:
        """The next entries, a megabyte of them at the most; none at the end of what there is.

        Raises ConfigError, which names the line, where anything but the last line is damaged or
        missing, and JournalUnread where the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self.read_bytes - len(self._last))
                if file.read(len(self._last)) != self._last:
                    file.seek(0)
                    self._lines, self._last, self.read_bytes, self._following = 0, b"", 0, 0
                lines = file.readlines(_READ_BYTES)
        except OSError as error:
            raise JournalUnread(f"{self._path} cannot be read: {error.strerror}") from error
        is_torn = bool(lines) and not lines[-1].endswith(b"\n")
        self.torn_bytes = len(lines.pop()) if is_torn else 0
        entries = [*decode(lines, self._where, self._lines)]
        following = self._following
        for entry in entries:
            if following not in (None, entry.number):
                raise ConfigError(
                    f"{self._path}: wanted entry {following} next, "
                    f"got {entry.number}; lines are missing or there twice"
                )
            following = entry.number + 1
        self._following = following
        self._lines, self._last = self._lines + len(lines), lines[-1] if lines else self._last
        self.read_bytes += sum(map(len, lines))
        return entries


def read_entries(
    path: Path, follow: Callable[[], bool] | None = None, begin: int = 0
) -> Iterator[Entry]:
    """All entries of a journal, also of one that is being written; or those from a byte on, at
    which a line begins.

    What follows the last whole line was not written to its end: it is left out, and the log says
    so. follow: called at the end of the file; where it returns True there may be more by then.
    Raises what `JournalReader.more` does.
    """
    reader = JournalReader(path, begin)
    while (entries := reader.more()) or (follow is not None and follow()):
        yield from entries
    if reader.torn_bytes:
        log.warning("%s: %s", path, torn_text(reader.torn_bytes))


def last_start(path: Path) -> Iterator[Entry]:
    """The entries of a journal's last start, read one after the other; none where it has ended, or
    there is no start. Raises what `JournalReader.more` does."""
    begin, ended = _last_start(path)
    return iter(()) if begin < 0 or ended else read_entries(path, begin=begin)


def last_end(path: Path) -> dict[str, Any] | None:
    """The action with which a journal's last start has ended; None while it has not, or there is no
    start. Raises ConfigError where it is damaged, JournalUnread where it cannot be read."""
    _, line = _last_start(path)
    for entry in decode([line] if line else [], f"{path}, the last start's end, line"):
        return next(action for action in entry.actions if action["type"] == "end")
    return None


def _last_start(path: Path) -> tuple[int, bytes]:
    """The byte at which the line of a journal's last start begins, -1 without one; and the line
    with its end, or nothing."""
    # Within a string each quote has a backslash before it.
    started = b'"event":{"type":"%s"' % COORDINATOR_STARTED.encode()
    try:
        with path.open("rb") as file:
            whole = find_last(file, b"\n", os.fstat(file.fileno()).st_size) + 1
            at = find_last(file, started, whole)
            if at < 0:
                return -1, b""
            end = find_last(file, b'{"type":"end"', whole)
            file.seek(find_last(file, b"\n", max(end, 0)) + 1)
            line = file.readline() if end > at else b""
            return find_last(file, b"\n", at) + 1, line
    except OSError as error:
        raise JournalUnread(f"{path} cannot be read: {error.strerror}") from error


def find_last(file: IO[bytes], mark: bytes, end: int) -> int:
    """Where a mark stands last in front of byte `end` of a file; -1 where it does not. Not by mmap:
    where the file system gives no bytes that kills the process, and here is an OSError."""
    while end > 0:
        begin = max(0, end - _LOOK_BYTES)
        file.seek(begin)
        if (at := file.read(end - begin).rfind(mark)) >= 0:
            return begin + at
        end = begin and begin + len(mark) - 1
    return -1


def last_step(path: Path) -> Entry | None:
    """The newest training step, looked for from the journal's end on. None where there is none, or
    it is damaged."""
    return _newest(path, b'"event":{"type":"%s"' % STEP_DONE.encode())


def steps_done(path: Path) -> int:
    """As many steps as the newest one says are done; 0 where there is none."""
    newest = last_step(path)
    return 0 if newest is None else int(newest.event["step"]) + 1


def last_entry(path: Path) -> Entry | None:
    """The newest entry of all, where it is not damaged."""
    return _newest(path, b"\n")


def _newest(path: Path, mark: bytes) -> Entry | None:
    """The last entry whose line has a mark."""
    try:
        with path.open("rb") as file:
            whole = find_last(file, b"\n", os.fstat(file.fileno()).st_size) + 1
            at = find_last(file, mark, whole)
            file.seek(find_last(file, b"\n", max(at, 0)) + 1)
            return next(decode([file.readline()], str(path))) if at >= 0 else None
    except (OSError, ConfigError):
        return None


def decode(lines: Iterable[bytes], where: str, lines_before: int = 0) -> Iterator[Entry]:
    """The entries of whole lines. Raises ConfigError for a damaged line."""
    for number, line in enumerate(lines, start=lines_before + 1):
        wanted, got = b',"crc":"%08x"}\n' % crc32(line[:-_CRC_BYTES]), line[-_CRC_BYTES:]
        if got != wanted:
            raise ConfigError(
                f"{where} {number} is damaged: wanted it to end in {wanted.decode().strip()}, "
                f"got {got.decode('ascii', 'replace').strip()}"
            )
        found = from_json(line)
        yield Entry(
            found["n"], found["t"], found["event"], found.get("actions", []), found.get("said", 0)
        )


def torn_text(num_bytes: int) -> str:
    return f"the last line was not written to its end; its {num_bytes} bytes are left out"
