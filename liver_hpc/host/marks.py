"""Processes of this machine found by a mark in their environment.

Descendants inherit it, also those that lost their parent or left its session: so a whole tree is
found after any of its members has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection

import psutil

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError

_AGAIN_S = 0.02


def marked_processes(name: str | Collection[str], value: str, spared: str = "") -> list[int]:
    """Living processes of this user that were started with `name=value` in the environment, or with
    one of several names; not those of a program that is `spared`."""
    names = (name,) if isinstance(name, str) else name
    return [
        process.pid
        for process in psutil.process_iter(["environ", "name"])
        if (environment := process.info["environ"])  # None for somebody else's
        and any(environment.get(each) == value for each in names)
        and process.info["name"] != spared
    ]


def kill_marked(
    name: str | Collection[str], value: str, limit_s: float, spared: str = ""
) -> list[int]:
    """Kills all marked processes, and what they start meanwhile, until there is none but those of
    a program that is `spared`.

    Returns whom it killed. Raises DeadlineError when some still live after `limit_s` (stuck in
    the kernel).
    """
    deadline = Deadline.after(SystemClock(), limit_s, "killed processes to end")
    pause = threading.Event()
    killed: set[int] = set()
    while found := marked_processes(name, value, spared):
        if deadline.expired():
            raise DeadlineError(f"waited {limit_s:g} s for killed processes {found} to end")
        killed.update(found)
        for process in found:
            with contextlib.suppress(ProcessLookupError):  # has ended meanwhile
                os.kill(process, signal.SIGKILL)
        pause.wait(_AGAIN_S)
    return sorted(killed)
