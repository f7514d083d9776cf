"""An agent's own channel: signals are passed on and end nothing, the coordinator's word does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from liver_hpc import __version__
from liver_hpc.node.agent import EXIT_COORDINATOR_GONE
from liver_hpc.protocol.messages import AgentHello, Exit, Warned, WorkerEnded
from tests.integration.agents import WORKER, Run, command_line, request, wait_for

pytestmark = pytest.mark.timeout(60)

SIGNALS = ("TERM", "USR1", "USR2")
WITH = pytest.mark.parametrize("options", [(), ("--warnings",)], ids=["", "warnings"])


def at_work(run: Run, then: str, options: tuple[str, ...] = ("--warnings",)) -> int:
    """An agent whose two workers are at work and whose channel stands; its process id."""
    run.open_rendezvous()
    run.launcher(then, options=options).launch(request())
    run.notes()
    run.coordinator.wait_heard(AgentHello)
    (agent,) = run.agents()
    # A hello that was heard here is not yet known as sent there.
    wait_for(lambda: "connected to the coordinator" in run.log("agent-a0"), "the channel to stand")
    return agent


def end(run: Run) -> int:
    """The coordinator ends the agent; its exit code."""
    run.coordinator.channels["a0"].send(Exit(reason="of no more use"))
    return run.wait_ended(run.launchers[0])


@WITH
def test_an_agent_says_who_it_is_and_ends_its_workers_when_told(
    run: Run, options: tuple[str, ...]
) -> None:
    agent = at_work(run, "works", options)
    (hello,) = run.coordinator.said(AgentHello)
    assert hello == AgentHello(agent="a0", host=socket.gethostname(), pid=agent)
    assert end(run) == 0
    assert "told to end: of no more use: ending worker 4, worker 5" in run.log("agent-a0")
    assert run.alive() == []
    assert run.coordinator.said(WorkerEnded) == []
    wait_for(lambda: run.coordinator.gone == ["a0"], "the channel to end")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_to_the_whole_tree_is_a_warning_and_ends_nothing(run: Run, name: str) -> None:
    signum = signal.Signals[f"SIG{name}"]
    agent = at_work(run, "has a child")
    tree = run.alive()
    assert len(tree) == 5  # workers with a child each
    before_s = time.time()
    for pid in tree:
        os.kill(pid, signum)
    (warned,) = run.coordinator.wait_heard(Warned)
    assert (warned.agent, warned.signal) == ("a0", name)
    assert before_s - 0.05 < warned.at_s < time.time() + 0.05
    os.killpg(agent, signum)
    run.coordinator.wait_heard(Warned, 2)
    for pid in run.alive():
        os.kill(pid, signal.SIGCONT)
    assert run.alive() == tree
    assert end(run) == 0
    assert run.alive() == []


def test_workers_do_not_mind_signals_from_their_first_moment_on(run: Run) -> None:
    run.open_rendezvous()
    agent = ["--version", __version__, "--agent", "a0", "--slots", "0,1", "--layout", "dp2"]
    line = [
        sys.executable,
        "-m",
        "liver_hpc.node.agent",
        "--run-directory",
        str(run.directory),
        *agent,
        "--warnings",
    ]
    with subprocess.Popen([*line, *run.options("works")]) as process:
        struck: set[int] = set()

        def strike() -> bool:
            for child in psutil.Process(process.pid).children():
                if WORKER in command_line(child.pid):
                    for name in SIGNALS:
                        os.kill(child.pid, signal.Signals[f"SIG{name}"])
                    struck.add(child.pid)
            return len(list(run.directory.glob("worker-?.json"))) == 2

        wait_for(strike, "workers to be at work")
        run.coordinator.wait_heard(AgentHello)
        assert {note["pid"] for note in run.notes()} == struck
        run.coordinator.channels["a0"].send(Exit(reason="over"))
        assert process.wait(10) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_in_boot_ends_the_agent(run: Run, signum: signal.Signals) -> None:
    launcher = run.launcher("never boots", options=["--warnings"])
    launcher.launch(request())
    wait_for(lambda: len(run.boots()) == 2, "workers to start")
    os.kill(run.agents()[0], signum)
    assert run.wait_ended(launcher) == 128 + signum
    assert run.alive() == []


def test_sigint_ends_an_agent_at_work(run: Run) -> None:
    os.kill(at_work(run, "works"), signal.SIGINT)
    assert run.wait_ended(run.launchers[0]) == 128 + signal.SIGINT
    assert run.alive() == []


@contextmanager
def silent_coordinator(run: Run) -> Iterator[threading.Event]:
    """Somebody listens, but never answers; set once the agent has come."""
    came = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        run.control = server.getsockname()

        def accept() -> None:
            connected, _ = server.accept()
            came.set()
            connected.recv(1)  # until the agent ends
            connected.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield came
        thread.join(10)


def test_a_signal_before_the_channel_stands_ends_the_agent(run: Run) -> None:
    with silent_coordinator(run) as came:
        run.open_rendezvous()
        launcher = run.launcher("works", options=["--warnings"])
        launcher.launch(request())
        run.notes()
        assert came.wait(10)
        os.kill(run.agents()[0], signal.SIGTERM)
        assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    assert run.alive() == []


@WITH
def test_a_worker_that_listens_to_nobody_is_killed(run: Run, options: tuple[str, ...]) -> None:
    at_work(run, "deaf", options)
    assert end(run) == 0
    polite = "SIGHUP" if options else "SIGTERM"
    assert f"worker 4 has not ended 1 s after {polite}" in run.log("agent-a0")
    assert run.alive() == []


@pytest.mark.parametrize("from_the_start", [True, False], ids=["never there", "gone"])
def test_without_a_coordinator_the_agent_ends_and_all_its_workers(
    run: Run, from_the_start: bool
) -> None:
    if from_the_start:
        run.coordinator.close()
        run.open_rendezvous()
        run.launcher("works", options=["--warnings"]).launch(request())
        run.notes()
    else:
        at_work(run, "works")
        run.coordinator.close()
    assert run.wait_ended(run.launchers[0]) == EXIT_COORDINATOR_GONE
    log = run.log("agent-a0")
    assert "the coordinator is gone: " in log
    assert ": ending worker 4, worker 5" in log
    assert run.alive() == []


@WITH
def test_a_workers_end_is_told_with_how_it_ended(run: Run, options: tuple[str, ...]) -> None:
    at_work(run, "works", options)
    killed, failed = (note["pid"] for note in run.notes())
    assert isinstance(killed, int)
    assert isinstance(failed, int)
    os.kill(killed, signal.SIGKILL)
    run.coordinator.wait_heard(WorkerEnded)
    os.kill(failed, signal.SIGINT)
    assert run.wait_ended(run.launchers[0]) == 128 + signal.SIGKILL
    first, second = run.coordinator.wait_heard(WorkerEnded, 2)
    assert (first.agent, first.worker) == ("a0", 4)
    assert first.how == "signal 9; see logs/worker-a0-0.log"
    assert (second.worker, second.how) == (5, "signal 2; see logs/worker-a0-1.log")
    assert (run.directory / "logs" / "worker-a0-1.log").exists()
