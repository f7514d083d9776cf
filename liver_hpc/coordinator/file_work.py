"""What has to do with files is done by a thread: a file system may take long, the loop may not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Generic, TypeVar

from liver_hpc.checkpoint.index import INDEX_FILE
from liver_hpc.host.process import quiet_thread
from liver_hpc.run.epoch import Epoch, Superseded

log = logging.getLogger(__name__)

T = TypeVar("T")


class FileWork(Generic[T]):
    """Does one task after the other, and keeps what they have found out until somebody asks. Tasks
    raise nothing. None is begun any more once another coordinator has taken over from `epoch`.

    what: they do, for the log. wake: called in the thread when something has been found out. Raises
    LiverError where there is no thread for it.
    """

    def __init__(self, what: str, epoch: Epoch, wake: Callable[[], None] = lambda: None) -> None:
        self._what = what
        self._epoch = epoch
        self._wake = wake
        self._tasks = Queue[Callable[[], T | None] | None]()
        self._found = SimpleQueue[T]()
        quiet_thread(self._work, what)

    def do(self, task: Callable[[], T | None]) -> None:
        """Returns at once; from any thread."""
        self._tasks.put(task)

    def say(self, found: T) -> None:
        """What a task has found out that goes on."""
        self._found.put(found)
        self._wake()

    def found(self) -> list[T]:
        """What has been found out since the last call."""
        return [self._found.get() for _ in range(self._found.qsize())]

    def settle(self, limit_s: float) -> bool:
        """Waits until nothing is to be done, for so long at most; whether it is so, which the log
        says where it is not."""
        done = self._tasks.all_tasks_done
        with done:
            settled = done.wait_for(lambda: not self._tasks.unfinished_tasks, limit_s)
        if not settled:
            log.warning("waited %g s for %s; not all is done", limit_s, self._what)
        return settled

    def close(self, limit_s: float) -> None:
        """Waits likewise; the thread ends when all is done."""
        self.settle(limit_s)
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if (outcome := self._outcome(task)) is not None:
                self.say(outcome)
            self._tasks.task_done()
        self._tasks.task_done()

    def _outcome(self, task: Callable[[], T | None]) -> T | None:
        try:
            self._epoch.check()
        except Superseded as superseded:  # the loop finds out, too
            log.warning("%s: not done any more: %s", self._what, superseded)
            return None
        except OSError as error:  # what is to be done finds it, too
            log.warning("%s: %s", self._what, error)
        return task()


def remove(path: Path) -> None:
    """Of a directory that cannot be removed only the log speaks: the run goes on."""
    try:
        if path.is_symlink():  # what it leads to is an archive's
            path.unlink()
        if not path.exists():
            return
        # Without its index first: half a directory must not look like a checkpoint.
        (path / INDEX_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)
