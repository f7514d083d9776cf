"""A process ends with the one that it serves, whichever way that one ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from liver_hpc.host.lifeline import EXIT_ORPHANED, guarded, quiet_thread

pytestmark = pytest.mark.timeout(30)

# Each parent prints the process id of what it started, then sits there to be killed.
GUARDED_PARENT = """
import subprocess, sys, threading
from liver_hpc.host.lifeline import guarded
child = subprocess.Popen(guarded(["/bin/sleep", "60"]))
print(child.pid, flush=True)
threading.Event().wait()
"""
WATCHED_PARENT = """
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()  # it watches
print(child.pid, flush=True)
threading.Event().wait()
"""
WATCHING_CHILD = """
import os, threading
from liver_hpc.host.lifeline import on_parent_exit
on_parent_exit(lambda: os._exit(0))
print("watching", flush=True)
threading.Event().wait()
"""
DYING_CHILD = """
import os, signal, sys, threading
from liver_hpc.host.lifeline import die_with_parent
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
        pytest.param((GUARDED_PARENT,), id="guarded"),
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


def test_guarded_command_runs_and_passes_its_exit_code_on() -> None:
    assert subprocess.run(guarded(["/bin/sh", "-c", "exit 7"])).returncode == 7


def test_guarded_command_that_does_not_exist_says_so() -> None:
    done = subprocess.run(guarded(["/no/such/command"]), capture_output=True, text=True)
    assert done.returncode == 1
    assert "/no/such/command: No such file" in done.stderr


def test_guarded_command_has_no_signal_blocked_although_its_parents_thread_has() -> None:
    masks: list[str] = []

    def spawn() -> None:
        command = guarded(["/bin/grep", "SigBlk", "/proc/self/status"])
        masks.append(subprocess.run(command, capture_output=True, text=True).stdout)

    quiet_thread(spawn, "spawner").join()
    assert masks == ["SigBlk:\t0000000000000000\n"]


def ignored_by(command: list[str], started_with: set[signal.Signals]) -> int:
    """The mask of ignored signals of a command, started with some blocked; TERM comes at once."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, started_with)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.terminate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    output, _ = process.communicate(timeout=20.0)
    assert process.returncode == 0
    return int(output.split()[1], 16)


def test_guarded_command_ignores_signals_from_its_first_instruction_on() -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1)
    show = ["/bin/grep", "SigIgn", "/proc/self/status"]
    mask = ignored_by(guarded(show, ignored=signals), set(signals))
    assert mask & (1 << (signal.SIGTERM - 1))
    assert mask & (1 << (signal.SIGUSR1 - 1))
    assert not mask & (1 << (signal.SIGUSR2 - 1))
    # What the command starts inherits it, also through a Python in between.
    script = f"import subprocess; subprocess.run({show})"
    between = guarded([sys.executable, "-c", script], ignored=signals)
    assert ignored_by(between, set(signals)) & (1 << (signal.SIGTERM - 1))


def test_process_that_finds_another_parent_exits_at_once() -> None:
    with running(sys.executable, "-c", DYING_CHILD, "1") as process:
        assert process.wait(10.0) == EXIT_ORPHANED


def test_quiet_thread_takes_no_signals_and_the_caller_still_does() -> None:
    masks: list[set[signal.Signals]] = []

    def note() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    quiet_thread(note, "quiet").join()
    threading.Thread(target=note).start()
    note()
    assert signal.SIGTERM in masks[0]
    assert all(signal.SIGTERM not in mask for mask in masks[1:])
