"""The agent's meeting at the rendezvous, and whoever is killed: the rest of the tree follows."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from liver_hpc import __version__
from liver_hpc.node.launch import EXIT_BOOT, EXIT_NOT_MET, EXIT_RENDEZVOUS_LOST, EXIT_STUCK
from liver_hpc.protocol.messages import AgentHello
from liver_hpc.rendezvous.base import Answer, Identity
from tests.integration.agents import (
    Run,
    acceptor_pid,
    command_line,
    dead_turn,
    listens,
    request,
    wait_for,
)

pytestmark = pytest.mark.timeout(60)

OWNER = """
import sys, threading
from pathlib import Path
from liver_hpc.cluster.launcher import local_launcher
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
directory, *options = sys.argv[1:]
launcher = local_launcher(Path(directory), further_options=options)
launcher.launch(LaunchAgent("a0", Seat("", (0, 1)), Layout(1, 1, 2)))
threading.Event().wait()
"""


# ---- the meeting


def test_in_a_meeting_nothing_listens_beyond_the_runs_own_interface(run: Run) -> None:
    """While joiner and acceptor talk over MPI: their ports, the queue, the control channel."""
    seen: list[str] = []

    def answer(who: Identity) -> Answer:
        joiner = run.joiner()
        acceptor = acceptor_pid(run.rendezvous)
        assert acceptor is not None
        assert listens(joiner)
        assert listens(acceptor)
        seen.extend(run.listens())
        return run.answer(who)

    run.rendezvous.start(answer)
    run.launcher("works").launch(request())
    run.notes()
    assert len(seen) >= 4
    assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}


def test_a_stranger_on_this_machine_cannot_take_the_joiners_place(run: Run) -> None:
    """Its way into MPI is a socketpair: there is no port at which to speak for either end."""
    launcher = run.launcher("works")
    with contextlib.ExitStack() as strangers:
        with run.queue() as came:
            launcher.launch(request())
            assert came.wait(20)
            joiner = run.joiner()
            (agent,) = run.agents()
            listeners = {pid: listens(pid) for pid in run.alive() if listens(pid)}
            assert listeners.keys() == {joiner}
            ((host, _, port),) = (address.rpartition(":") for address in listeners[joiner])
            for words in (b"cmd=init pmi_version=1 pmi_subversion=1\n", bytes(4), b""):
                stranger = socket.create_connection((host, int(port)), timeout=0.2)
                strangers.enter_context(stranger).sendall(words)  # to MPI's own port
                with contextlib.suppress(TimeoutError, ConnectionError):
                    assert stranger.recv(100) == b""
            for pid in (joiner, agent):
                names = {one.laddr for one in psutil.Process(pid).net_connections("unix")}
                assert names <= {""}
        run.open_rendezvous()
        assert [note["told"]["worker"] for note in run.notes()] == [4, 5]  # type: ignore[index]


def test_the_joiner_gets_no_secret_and_is_gone_once_the_agent_has_met(run: Run) -> None:
    launcher = run.launcher("works")
    with run.queue() as came:
        launcher.launch(request())
        assert came.wait(15)
        joiner = run.joiner()
        told = Path(f"/proc/{joiner}/environ").read_bytes().split(b"\0")
        assert b"PMI_SIZE=1" in told
        assert run.secret.hex().encode() not in b"".join(told)
        assert run.secret.hex() not in str([command_line(pid) for pid in run.alive()])
    run.open_rendezvous()
    run.notes()
    assert run.joiners() == []
    assert len(run.alive()) == 3  # the agent and its workers
    (agent,) = run.agents()
    assert [address for pid in run.alive() for address in listens(pid)] == []
    assert "libmpi" not in Path(f"/proc/{agent}/maps").read_text()


def test_a_process_manager_around_the_agent_is_not_asked(run: Run) -> None:
    """As under srun --mpi=pmi2, or in a world of several tasks."""
    agent = [sys.executable, "-m", "liver_hpc.node.agent", "--run-directory", str(run.directory)]
    agent += ["--version", __version__, "--agent", "a0"]
    work = ["--slots", "0,1", "--layout", "tp1 pp1 dp2", *run.options("ends")]
    foreign = {
        "PMI_FD": "99",
        "PMI_RANK": "3",
        "PMI_SIZE": "8",
        "PMIX_RANK": "3",
        "PMI_SPAWNED": "1",
    }
    run.open_rendezvous()
    with subprocess.Popen([*agent, *work], env={**os.environ, **foreign}) as started:
        for note in run.notes():
            environment = note["environment"]
            assert isinstance(environment, dict)
            assert not [name for name in environment if name.startswith("PMI")]
        assert started.wait(15) == 1


@pytest.mark.parametrize(
    ("then_hangs_up", "meet_s", "code", "why"),
    [
        (True, 20.0, EXIT_RENDEZVOUS_LOST, "ERROR [agent a0] the rendezvous of"),
        (False, 2.0, EXIT_STUCK, "ERROR [agent a0] stuck in MPI: waited 2 s for the rendezvous of"),
    ],
    ids=["rendezvous lost", "stuck"],
)
def test_a_meeting_that_breaks_off_in_mpi_fails_the_agent_which_says_why(
    run: Run, then_hangs_up: bool, meet_s: float, code: int, why: str
) -> None:
    run.set_deadline("meet_s", meet_s)
    launcher = run.launcher("works")
    with run.queue(dead_turn(run.directory), then_hangs_up):
        launcher.launch(request())
        assert run.wait_ended(launcher) == code
    assert why in run.log("agent-a0")
    assert run.alive() == []


def test_without_a_rendezvous_the_agent_gives_up_at_the_deadline(run: Run) -> None:
    run.set_deadline("meet_s", 0.5)
    launcher = run.launcher("works")
    launcher.launch(request())
    assert run.wait_ended(launcher) == EXIT_NOT_MET
    assert "[agent a0] waited 0.5 s for the rendezvous of" in run.log("agent-a0")


def test_a_joiner_that_stands_still_is_killed_at_the_deadline(run: Run) -> None:
    """Before its turn: as long as all others may take to boot and to meet."""
    run.set_deadline("boot_s", 4.0)
    run.set_deadline("meet_s", 1.0)
    launcher = run.launcher("works")
    with run.queue() as came:
        launcher.launch(request())
        assert came.wait(15)
        joiner = run.joiner()
        os.kill(joiner, signal.SIGSTOP)
        assert run.wait_ended(launcher) == EXIT_NOT_MET
    assert "[agent a0] waited 5 s for the rendezvous of" in run.log("agent-a0")
    assert run.alive() == []


def test_a_worker_that_dies_during_the_meeting_fails_the_agent_at_once(run: Run) -> None:
    launcher = run.launcher("works")
    with run.queue() as came:
        launcher.launch(request())
        assert came.wait(15)
        (worker, _) = [pid for pid in run.find(sys.executable, "-c") if pid not in run.agents()]
        os.kill(worker, signal.SIGKILL)
        assert run.wait_ended(launcher) == EXIT_BOOT
    assert "of agent a0 ended in boot (signal 9)" in run.log("agent-a0")
    assert run.alive() == []


def test_an_agent_told_to_stop_during_the_meeting_stops_at_once(run: Run) -> None:
    launcher = run.launcher("works")
    with run.queue() as came:
        launcher.launch(request())
        assert came.wait(15)
        launcher.kill("a0")
        assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    ending = "ending worker 0 of agent a0, worker 1 of agent a0"  # they have no ids yet
    assert f"stopped by SIGTERM: {ending}" in run.log("agent-a0")
    assert run.alive() == []


# ---- whoever is killed, the rest follows


@contextmanager
def owned(run: Run, then: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own with a launcher that has launched an agent; killed at the end."""
    command = [sys.executable, "-c", OWNER, str(run.directory), *options, *run.options(then)]
    with subprocess.Popen(command) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.parametrize("options", [(), ("--warnings",)], ids=["", "warnings"])
@pytest.mark.parametrize("booted", [True, False], ids=["at work", "in boot"])
@pytest.mark.parametrize("victim", ["owner", "agent"])
def test_sigkill_of_any_process_above_the_workers_leaves_nothing(
    run: Run, victim: str, booted: bool, options: tuple[str, ...]
) -> None:
    if booted:
        run.open_rendezvous()
    with owned(run, "works" if booted else "never boots", *options) as owner:
        if booted:
            run.notes()
        else:
            wait_for(lambda: len(run.boots()) == 2, "workers to start")
        os.kill(owner.pid if victim == "owner" else run.agents()[0], signal.SIGKILL)
        if booted and victim == "owner" and not options:
            run.coordinator.wait_heard(AgentHello)  # another coordinator may adopt it
            run.coordinator.close()
        wait_for(lambda: set(run.alive()) <= {owner.pid}, "the tree to end", 5.0)


def test_an_agent_that_finds_its_parent_gone_when_it_starts_ends_at_once(run: Run) -> None:
    launcher = run.launcher("never boots", options=["--parent", "1"])
    launcher.launch(request())
    assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    assert run.alive() == []


def test_what_coordinator_and_agent_leave_that_are_killed_is_ended_by_the_next_coordinator(
    run: Run,
) -> None:
    run.open_rendezvous()
    with owned(run, "has a child") as owner:
        run.notes()
        run.coordinator.wait_heard(AgentHello)
        (agent,) = run.agents()
        owner.kill()
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: len(run.alive()) == 2, "all but the workers' children to end", 5.0)
    assert len(run.find("/bin/sleep", "60")) == 2
    assert not run.launcher("works").adopt("a0", "", socket.gethostname(), agent)
    assert run.alive() == []


@pytest.mark.parametrize("victim", ["owner", "agent", "joiner"])
def test_sigkill_of_any_process_in_the_meeting_leaves_nothing(run: Run, victim: str) -> None:
    with run.queue() as came, owned(run, "works") as owner:
        assert came.wait(15)
        joiner, (agent,) = run.joiner(), run.agents()
        pids = {"owner": owner.pid, "agent": agent, "joiner": joiner}
        os.kill(pids[victim], signal.SIGKILL)
        wait_for(lambda: set(run.alive()) <= {owner.pid}, "the tree to end", 5.0)
    if victim == "joiner":
        said = f"the joiner, process {joiner}, has ended"
        assert said in run.log("agent-a0")
