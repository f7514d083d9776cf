"""The launcher for this machine, where there are no threads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster import launcher as module
from liver_hpc.cluster.launcher import (
    KILLED,
    Launcher,
    LocalAgent,
    NotLaunched,
    local_launcher,
)
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Child, Command, new_mark
from liver_hpc.host.marks import marked_processes
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from tests.fakes import threads_refused

LIMIT_S = 30.0
MARK = new_mark()


def agent() -> LocalAgent:
    words = ["sh", "-c", "sleep 300; true", "--run-directory", "here", "--agent", "a0"]
    return LocalAgent("a0", Command("agent a0", words, mark=MARK), exit_s=10.0)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(lambda launches: [agent()], close_s=LIMIT_S)
    yield made
    made.close()
    assert living() == []


def living() -> list[int]:
    return marked_processes(MARK, "1")


def launch(launcher: Launcher) -> None:
    launcher.launch(LaunchAgent("a0", Seat("", (0,)), Layout(1, 1, 1)))


def test_an_agent_that_no_thread_can_keep_is_not_launched_and_can_be_again(
    launcher: Launcher,
) -> None:
    with (
        threads_refused("keep-"),
        pytest.raises(NotLaunched, match="keep-a0: can't start new thread"),
    ):
        launch(launcher)
    assert living() == []
    launch(launcher)
    assert launcher.alive("a0")


def test_an_agent_that_was_left_and_that_no_thread_can_keep_is_ended() -> None:
    left = Child(agent()._command)
    deadline = Deadline.after(SystemClock(), LIMIT_S, "the agent's program to be there")
    poll_until(lambda: left.pid in living(), deadline)  # its exec has begun, and may not be over
    with threads_refused("keep-"), pytest.raises(LiverError, match="can't start new thread"):
        agent().adopt(socket.gethostname(), left.pid)
    assert (living(), left.wait(LIMIT_S)) == ([], KILLED)


def test_an_agent_is_adopted_whose_run_directory_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs/ is a link to a scratch, and commands follow it."""
    (tmp_path / "stand_in.py").write_text("import time; time.sleep(300)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "AGENT_MODULE", "stand_in")
    scratch, link = tmp_path / "scratch", tmp_path / "runs"
    scratch.mkdir()
    link.symlink_to(scratch)
    with closing(local_launcher(link)) as first, closing(local_launcher(scratch)) as second:
        launch(first)
        (pid,) = marked_processes(module._mark(scratch, "a0"), "1")
        begun = Deadline.after(SystemClock(), LIMIT_S, "the agent's program to be there")
        poll_until(lambda: "stand_in" in psutil.Process(pid).cmdline()[:4], begun)
        assert second.adopt("a0", "", socket.gethostname(), pid)
        assert psutil.pid_exists(pid)


def test_an_agent_is_killed_without_another_thread(launcher: Launcher) -> None:
    launch(launcher)
    with threads_refused():
        launcher.kill("a0")
    poll_until(
        lambda: not launcher.alive("a0"), Deadline.after(SystemClock(), LIMIT_S, "the end of a0")
    )
    assert launcher.exit_code("a0") == 143


def test_in_a_slurm_job_an_agent_has_signals_for_warnings_and_is_ended_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may signal all processes of a job, where the coordinator alone is to hear it."""
    (tmp_path / "stand_in.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if '--warnings' in sys.argv else exit)\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7 * ('--warnings' in sys.argv)))\n"
        "pathlib.Path('there').touch()\n"
        "time.sleep(300)\n"
    )
    monkeypatch.setattr(module, "AGENT_MODULE", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    with closing(local_launcher(tmp_path, in_job=True)) as launcher:
        launch(launcher)
        begun = Deadline.after(SystemClock(), LIMIT_S, "the agent's program to be there")
        poll_until((tmp_path / "there").exists, begun)
        launcher.kill("a0")
        ended = Deadline.after(SystemClock(), LIMIT_S, "the end of a0")
        poll_until(lambda: not launcher.alive("a0"), ended)
        assert launcher.exit_code("a0") == 7
