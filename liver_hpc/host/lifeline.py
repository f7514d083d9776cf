"""Lifelines: a process ends when the process that it serves has ended, however that one died.

Linux 5.3 or newer: `prctl(PR_SET_PDEATHSIG)` and process file descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

EXIT_ORPHANED = 86
"""Exit code of a process that found its parent already gone when it started."""

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Has the kernel send `signum` to this process once the thread that started it has ended.

    `parent` is the process id that the parent had when it started this process; if it is no
    longer the parent, this process exits at once with EXIT_ORPHANED. Unblocks `signum`.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if libc.prctl(*map(ctypes.c_ulong, arguments)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


def quiet_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread to which the kernel delivers no signal of the process.

    Not for a thread that starts processes, unless by `child.Child`: others would inherit its
    blocked signals.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return thread


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
