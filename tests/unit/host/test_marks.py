"""Processes are found and killed by their mark, also those that broke away from their tree."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.host.marks import kill_marked, marked_processes

pytestmark = pytest.mark.timeout(30)

MARK = "LIVER_TEST_MARK"


@pytest.fixture
def mark() -> Iterator[str]:
    value = secrets.token_hex(8)
    yield value
    kill_marked(MARK, value, 5.0)


def spawn(mark: str, script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", script], env={**os.environ, MARK: mark})


def wait_for(mark: str, count: int) -> None:
    deadline = Deadline.after(SystemClock(), 5.0, f"{count} marked processes")
    poll_until(lambda: len(marked_processes(MARK, mark)) == count, deadline)


def test_finds_descendants_that_left_their_session_and_lost_their_parent(mark: str) -> None:
    spawn(mark, "setsid sleep 60 & exit 0").wait()
    wait_for(mark, 1)
    assert os.getpid() not in marked_processes(MARK, mark)


def test_does_not_take_a_longer_value_or_an_argument_for_the_mark(mark: str) -> None:
    with spawn(mark + "0", f": {MARK}={mark}; exec sleep 60") as process:
        assert marked_processes(MARK, mark) == []
        process.kill()


def test_a_zombie_does_not_count(mark: str) -> None:
    process = spawn(mark, "exit 0")
    wait_for(mark, 0)  # not waited for yet
    process.wait()


def test_kills_them_all_although_they_ignore_sigterm(mark: str) -> None:
    process = spawn(mark, "trap '' TERM; (setsid sleep 60 &) ; sleep 60 & sleep 60; exit 0")
    wait_for(mark, 4)
    process.terminate()
    victims = marked_processes(MARK, mark)
    assert kill_marked(MARK, mark, 5.0) == sorted(victims)
    assert marked_processes(MARK, mark) == []
    assert process.wait(5.0) == -signal.SIGKILL


def test_where_nothing_lives_nothing_is_killed(mark: str) -> None:
    spawn(mark, "exit 0").wait()
    assert kill_marked(MARK, mark, 5.0) == []


def test_a_program_may_be_spared(mark: str) -> None:
    process = spawn(mark, "sleep 60 & exec tail -f /dev/null")
    wait_for(mark, 2)
    assert len(kill_marked(MARK, mark, 5.0, spared="tail")) == 1
    assert marked_processes(MARK, mark) == [process.pid]
    process.kill()
    process.wait(5.0)
