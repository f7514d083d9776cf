"""Worker processes as their agent sees them; their program is a script of the test."""

from __future__ import annotations

import importlib.util
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.host import process
from liver_hpc.node.workers import NodeWorkers, WorkerPlan, workers_environment
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.local import Said
from tests.fakes import threads_refused

SPEAKS_LAST = """
import os, socket, struct
line = socket.socket(fileno=int(os.environ["LIVER_AGENT_FD"]))
def say(data, way=0):
    line.sendall(struct.pack("!IB", len(data), way) + data)
say(b"booted")
line.recv(1000)
say(b"my last words")
"""

FAILS = f"""
{SPEAKS_LAST}
say(b"ValueError: no such shard \\xff", 3)
os._exit(1)
"""

HAS_A_HELPER = """
import os, socket, struct, subprocess
line = socket.socket(fileno=int(os.environ["LIVER_AGENT_FD"]))
helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
with open(f"logs/helper-{os.environ['LIVER_LOCAL_RANK']}", "w") as file:
    file.write(str(helper.pid))
line.sendall(struct.pack("!IB", 6, 0) + b"booted")
line.recv(1000)
line.recv(1000)
"""


class Watched:
    """Workers, and what is heard of them."""

    def __init__(
        self, directory: Path, script: str = SPEAKS_LAST, slots: tuple[int, ...] = (0,)
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[tuple[int, str]] = []
        (directory / "logs").mkdir()
        command = (sys.executable, "-S", "-c", script)
        plan = WorkerPlan(directory, "a0", slots, command, sheltered=False)
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


def test_one_that_the_kernel_has_ended_for_want_of_memory_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(process, "VMSTAT", vmstat)
    vmstat.write_text("pgfault 12\noom_kill 3\noom_kill_x 9\n")
    watched = Watched(tmp_path, HAS_A_HELPER.replace('"300"', '"0"'), slots=(0, 1))
    workers = watched.workers
    try:
        while workers.booting():
            watched.turn()
        workers.hand_out(Answer(worker_ids=(7, 8), control_host="127.0.0.1", control_port=1))
        for worker, count in ((7, 3), (8, 4)):
            vmstat.write_text(f"pgfault 13\noom_kill {count}\n")
            workers.kill(worker)
            while len(watched.heard) < worker - 6:
                watched.turn()
    finally:
        workers.end(0.0)
        watched.selector.close()
    told = "; since the launch the kernel's memory killer has ended 1 on this node"
    assert watched.heard == [
        (7, "signal 9; see logs/worker-a0-0.log"),
        (8, f"signal 9{told}; see logs/worker-a0-1.log"),
    ]


def test_why_one_has_failed_is_told_with_its_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, FAILS)
    try:
        while watched.workers.booting():
            watched.turn()
        answer = Answer(worker_ids=(7,), control_host="127.0.0.1", control_port=1)
        watched.workers.hand_out(answer)
        while not watched.workers.all_over():
            watched.turn()
    finally:
        watched.workers.end(0.0)
        watched.selector.close()
    assert watched.heard == [
        (7, "my last words"),
        (7, "ValueError: no such shard \ufffd; exit code 1; see logs/worker-a0-0.log"),
    ]


LOADS_OPENMP = """
import ctypes, os, sys
before = os.sched_getaffinity(0)
ctypes.CDLL(sys.argv[1])
print(os.sched_getaffinity(0) == before)
"""


@pytest.mark.parametrize(
    "told", [{}, {"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}, {"GOMP_CPU_AFFINITY": "0-1"}]
)
def test_workers_of_a_node_are_not_all_bound_to_its_first_core(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr,misc]
    library = next(Path(torch).parent.glob("torch*/**/libgomp*.so*"))
    words = [sys.executable, "-S", "-c", LOADS_OPENMP, str(library)]
    for environment, unbound in ((None, not told), (workers_environment(), True)):
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.split() == [str(unbound or os.cpu_count() == 1)]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_what_a_lost_worker_had_started_ends_and_what_its_sibling_has_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    watched = Watched(tmp_path, HAS_A_HELPER, slots=(0, 1))
    workers = watched.workers
    try:
        while workers.booting():
            watched.turn()
        workers.hand_out(Answer(worker_ids=(7, 8), control_host="127.0.0.1", control_port=1))
        lost, kept = (
            psutil.Process(int((tmp_path / f"logs/helper-{slot}").read_text())) for slot in (0, 1)
        )
        workers.kill(7)
        while not watched.heard:
            watched.turn()
        deadline = Deadline.after(SystemClock(), 10.0, "the lost worker's helper to end")
        poll_until(lambda: not lives(lost), deadline, interval_s=0.01)
        poll_until(lambda: "worker 7 had left processes" in caplog.text, deadline)
        assert lives(kept)
        assert workers.living() == ["worker 8"]
    finally:
        workers.end(0.0)
        watched.selector.close()
    assert not lives(kept)


def test_where_no_thread_can_end_what_a_lost_worker_had_started_the_launch_goes_on(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    workers = watched.workers
    while workers.booting():
        watched.turn()
    with threads_refused("left by"):
        workers.hand_out(Answer(worker_ids=(7,), control_host="127.0.0.1", control_port=1))
        while not workers.all_over():
            watched.turn()
    assert "left by worker 7: can't start new thread" in caplog.text
    assert watched.heard[-1] == (7, "exit code 0; see logs/worker-a0-0.log")
