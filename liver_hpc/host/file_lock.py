"""One process at a time: a lock on a file, for what several processes would otherwise build."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import ConfigError

LOCK_LIMIT_S = 300.0
"""The longest wait for a lock: whoever holds it is tokenizing text or shuffling samples."""


@contextlib.contextmanager
def file_lock(path: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which is created and left behind.

    The lock ends with its process, however that ends. Raises DeadlineError after `limit_s`, and
    ConfigError where the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    with stream:

        def taken() -> bool:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        deadline = Deadline.after(SystemClock(), limit_s, f"the process that has locked {path}")
        poll_until(taken, deadline)
        yield
