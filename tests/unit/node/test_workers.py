"""Worker processes as their agent sees them; their program is a script of the test."""

from __future__ import annotations

import selectors
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.node.workers import NodeWorkers, WorkerPlan
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.local import Said

SPEAKS_LAST = """
import os, socket, struct
line = socket.socket(fileno=int(os.environ["LIVER_AGENT_FD"]))
def say(data):
    line.sendall(struct.pack("!IB", len(data), 0) + data)
say(b"booted")
line.recv(1000)
say(b"my last words")
"""


class Watched:
    """One worker, and what is heard of it."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[tuple[int, str]] = []
        (directory / "logs").mkdir()
        command = (sys.executable, "-S", "-c", SPEAKS_LAST)
        plan = WorkerPlan(directory, "a0", (0,), command, sheltered=False)
        self.workers = NodeWorkers(plan, self.selector, self._ended, self._said, pytest.fail)
        self.workers.start(None)

    def _said(self, worker: int, said: Said) -> None:
        self.heard.append((worker, said.data.decode()))

    def _ended(self, worker: int, how: str) -> None:
        self.heard.append((worker, how))

    def turn(self) -> None:
        for key, _ in self.selector.select(10.0):
            key.data()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.workers.end(0.0)
    watched.selector.close()


def test_ending_them_again_ends_nobody(watched: Watched) -> None:
    watched.workers.end(0.0)
    watched.workers.end(0.0)
    assert watched.workers.living() == []


def test_one_that_has_ended_is_over_once_its_last_words_were_heard(watched: Watched) -> None:
    """Nobody may let go of it in the time between."""
    workers = watched.workers
    while workers.booting():
        watched.turn()
    workers.hand_out(Answer(worker_ids=(7,), control_host="127.0.0.1", control_port=1))
    deadline = Deadline.after(SystemClock(), 10.0, "its end")
    poll_until(lambda: not workers.living(), deadline, interval_s=0.01)
    assert not workers.all_over()
    assert watched.heard == []
    while not workers.all_over():
        watched.turn()
    assert watched.heard == [
        (7, "my last words"),
        (7, "exit code 0; see logs/worker-a0-0.log"),
    ]
