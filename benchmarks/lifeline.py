"""Lifelines: a process ends when the process that it serves has ended, however that one died.

For processes that somebody else starts: launchers of peers, multiprocessing. Linux 5.3 or newer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable

from liver_hpc.host.child import end_with_parent
from liver_hpc.host.process import quiet_thread


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Has the kernel send `signum` to this process once the thread that started it has ended.

    `parent` is the process id that the parent had when it started this process; if it is no
    longer the parent, this process exits at once. Unblocks `signum`.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    end_with_parent(parent, signum)


def on_parent_exit(act: Callable[[], None]) -> None:
    """Calls `act` in a thread of its own once the parent process has ended.

    Unlike with `die_with_parent`, the thread of the parent that started this process may end
    before it. A parent that ended before this call is not noticed.
    """
    parent = os.getppid()

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(parent)
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            # A recycled number can only be watched if the parent has changed by now.
            if os.getppid() == parent:
                poller.poll()
            os.close(descriptor)
        act()

    quiet_thread(watch, "parent-watch")
