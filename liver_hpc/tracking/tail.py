"""The journal as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from liver_hpc.run.entries import Entry, decode

READ_BYTES = 2**20


class Tail:
    """What was appended to a journal since the last look; a line without an end waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end_bytes = 0
        self._lines = 0

    def entries(self) -> Iterator[Entry]:
        """Those that are whole. Raises ConfigError where a line is damaged, OSError where the file
        cannot be read; a journal that is not there yet has none."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._end_bytes)
            while lines := file.readlines(READ_BYTES):
                if not lines[-1].endswith(b"\n"):
                    lines.pop()
                yield from decode(lines, f"{self._path}, line", self._lines)
                self._lines += len(lines)
                self._end_bytes += sum(map(len, lines))
                if not lines:
                    return
