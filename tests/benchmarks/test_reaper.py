"""A benchmark that is killed leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.reaper import MARK, nothing_outlives
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.host.marks import marked_processes

# A child in a session of its own, as a run's coordinator is, that stands still.
BENCHMARK = """
import signal, subprocess, sys, time
from benchmarks.reaper import nothing_outlives
with nothing_outlives():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)
    child.send_signal(signal.SIGSTOP)
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_of_a_benchmark_that_is_killed_nothing_stays_not_even_what_stands_still(
    repository: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], cwd=repository, stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        child = psutil.Process(int(benchmark.stdout.readline()))
        assert child.is_running()
        guard = next(p for p in psutil.Process(benchmark.pid).children() if p.pid != child.pid)
        benchmark.kill()
    end = Deadline.after(SystemClock(), 20.0, "the child and the guard to end")
    poll_until(lambda: not any(_lives(process) for process in (child, guard)), end, 0.05)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_one_has_started_that_fails_or_is_interrupted_is_killed() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = []

    def interrupted() -> None:
        with nothing_outlives():
            children.append(subprocess.Popen(sleep, start_new_session=True))  # as a coordinator
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    try:
        assert children[0].wait(10.0) == -signal.SIGKILL
    finally:
        children[0].kill()


def test_of_one_that_ends_what_it_keeps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "another's")
    with nothing_outlives():
        value = os.environ[MARK]
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        assert marked_processes(MARK, value) == [child.pid]
    assert child.poll() is None
    assert os.environ[MARK] == "another's"
    child.send_signal(signal.SIGKILL)
    child.wait()
