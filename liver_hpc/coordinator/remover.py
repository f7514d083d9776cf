"""Directories that nobody needs any more are removed by a thread: a file system may take long."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from queue import SimpleQueue

from liver_hpc.checkpoint.index import INDEX_FILE
from liver_hpc.host.process import quiet_thread

log = logging.getLogger(__name__)


class Remover:
    """Removes one directory after the other."""

    def __init__(self) -> None:
        self._paths = SimpleQueue[Path | None]()
        self._thread: threading.Thread | None = None

    def remove(self, path: Path) -> None:
        """Returns at once; nobody else may use that name any more."""
        if self._thread is None:
            self._thread = quiet_thread(self._work, "remover")
        self._paths.put(path)

    def close(self, limit_s: float) -> None:
        """Waits for what is being removed, and what waits, for so long at most; the next start of
        the run removes the rest."""
        if self._thread is None:
            return
        self._paths.put(None)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("waited %g s for old checkpoints to be removed; some are left", limit_s)

    def _work(self) -> None:
        while (path := self._paths.get()) is not None:
            remove(path)


def remove(path: Path) -> None:
    """Of a directory that cannot be removed only the log speaks: the run goes on."""
    if not path.exists():
        return
    try:
        # Without its index first: half a directory must not look like a checkpoint.
        (path / INDEX_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)
