"""A recipe whose worker loses its connections to other workers when a test says so; it lives."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.integration.faulty import FaultyGPT

_POLL_S = 0.01


def cut_file(run_directory: Path) -> Path:
    """Once it is there, the worker whose process id it holds is cut off."""
    return run_directory / "cut"


class CutGPT(FaultyGPT):
    """FaultyGPT in a process that can be cut off."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        threading.Thread(
            target=_cut_when_told, args=(cut_file(run_directory),), daemon=True
        ).start()


def _cut_when_told(told: Path) -> None:
    while not (told.exists() and told.read_text() == str(os.getpid())):
        time.sleep(_POLL_S)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                _shut(socket.socket(fileno=os.dup(fd)))


def _shut(connection: socket.socket) -> None:
    """The control channel is no TCP: it leads to the agent."""
    with connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.shutdown(socket.SHUT_RDWR)
