"""What a pool's process may have in it: here, nothing of a worker. Imports no torch."""

from __future__ import annotations

import os


class Plain:
    """Answers, and ends in several ways."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def number(self, factor: int) -> int:
        return factor * self._worker

    def fail(self, worker: int) -> None:
        if worker == self._worker:
            raise ValueError("as it was told")

    def end(self, worker: int) -> None:
        if worker == self._worker:
            os._exit(5)

    def wait(self, worker: int) -> None:
        if worker == self._worker:
            os.read(os.pipe()[0], 1)  # for ever
