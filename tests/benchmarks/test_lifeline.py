"""A process ends with the one that it serves, whichever way that one ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from liver_hpc.host.child import EXIT_ORPHANED

pytestmark = pytest.mark.timeout(30)

# Each parent prints the process id of what it started, then sits there to be killed.
WATCHED_PARENT = """
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()  # it watches
print(child.pid, flush=True)
threading.Event().wait()
"""
WATCHING_CHILD = """
import os, threading
from benchmarks.lifeline import on_parent_exit
on_parent_exit(lambda: os._exit(0))
print("watching", flush=True)
threading.Event().wait()
"""
DYING_CHILD = """
import os, signal, sys, threading
from benchmarks.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid(), signal.SIGTERM)
print("guarded", flush=True)
threading.Event().wait()
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def ends_within(pid: int, limit_s: float) -> bool:
    """Whether a process that is not ours to wait for ends; it is killed if not."""
    descriptor = os.pidfd_open(pid)
    try:
        ended = bool(select.select([descriptor], [], [], limit_s)[0])
        if not ended:
            os.kill(pid, signal.SIGKILL)
        return ended
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "parent",
    [
        pytest.param((WATCHED_PARENT, WATCHING_CHILD), id="on_parent_exit"),
        pytest.param((WATCHED_PARENT, DYING_CHILD), id="die_with_parent"),
    ],
)
def test_child_ends_when_its_parent_is_killed(parent: tuple[str, ...]) -> None:
    with running(sys.executable, "-c", *parent) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        assert ends_within(child, 5.0)


def test_process_that_finds_another_parent_exits_at_once() -> None:
    with running(sys.executable, "-c", DYING_CHILD, "1") as process:
        assert process.wait(10.0) == EXIT_ORPHANED
