"""The agent's meeting with the desk, and whoever is killed: the rest of the tree follows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from liver_hpc.node.agent import _MEET_MARGIN_S, EXIT_BOOT
from liver_hpc.rendezvous.mpi.calls import EXIT_DESK_LOST, EXIT_STUCK, TURN
from liver_hpc.rendezvous.mpi.joiner import EXIT_NOT_MET
from liver_hpc.rendezvous.mpi.process_manager import NO_TOPOLOGY_FILE, under_mpiexec
from tests.integration.agents import Run, command_line, request, wait_for

pytestmark = pytest.mark.timeout(60)

OWNER = """
import sys, threading
from pathlib import Path
from liver_hpc.cluster.launcher import NodeRequest
from liver_hpc.cluster.local import LocalLauncher
directory, *options = sys.argv[1:]
launcher = LocalLauncher(Path(directory), agent_options=options)
launcher.launch([NodeRequest(agent="a0", workers=2, layout="tp1 pp1 dp2")])
threading.Event().wait()
"""


# ---- the meeting


def test_the_joiner_and_its_mpiexec_are_gone_once_the_agent_has_met(run: Run) -> None:
    launcher = run.launcher("works")
    with run.bell() as rung:
        launcher.launch([request()])
        assert rung.wait(15)
        assert len(run.joiners()) == 1
        assert {"mpiexec", "hydra_pmi_proxy"} <= run.programs().keys()
        assert any(address.startswith("0.0.0.0:") for address in run.listens())
        assert run.secret.hex() not in str([command_line(pid) for pid in run.alive()])
    run.open_desk()
    run.notes()
    assert run.joiners() == []
    assert run.programs().keys() == {Path(sys.executable).name}
    assert len(run.alive()) == 3  # the agent and its workers
    assert run.listens() == []
    (agent,) = run.agents()
    assert "libmpi" not in Path(f"/proc/{agent}/maps").read_text()


def test_under_a_process_manager_the_joiner_gets_no_mpiexec_of_its_own(run: Run) -> None:
    agent = [sys.executable, "-m", "liver_hpc.node.agent", "--run-directory", str(run.directory)]
    work = ["--agent", "a0", "--workers", "2", "--layout", "tp1 pp1 dp2", *run.options("ends")]
    with run.bell() as rung:
        manager = subprocess.Popen(
            under_mpiexec([*agent, *work]), env={**os.environ, **NO_TOPOLOGY_FILE}
        )
        assert rung.wait(15)
        managers = [pid for pid in run.alive() if "mpiexec" in command_line(pid)[0]]
        assert managers == [manager.pid]
        assert len(run.joiners()) == 1
    run.open_desk()
    for note in run.notes():
        environment = note["environment"]
        assert isinstance(environment, dict)
        assert not [name for name in environment if name.startswith(("PMI", "HYDI"))]
    assert manager.wait(15) == 1


@pytest.mark.parametrize(
    ("then_hangs_up", "meet_s", "code", "why"),
    [
        (True, 20.0, EXIT_DESK_LOST, "[agent a0] connection to the rendezvous of"),
        (False, 2.0, EXIT_STUCK, "s for the rendezvous of"),
    ],
    ids=["desk lost", "stuck"],
)
def test_a_meeting_that_breaks_off_in_mpi_fails_the_agent_which_says_why(
    run: Run, then_hangs_up: bool, meet_s: float, code: int, why: str
) -> None:
    run.set_deadline("meet_s", meet_s)
    launcher = run.launcher("works")
    with run.bell(says=TURN, then_hangs_up=then_hangs_up):
        launcher.launch([request()])
        assert run.wait_ended(launcher) == code
    log = run.log("agent-a0")
    assert f"the joiner ended without an answer (exit code {code})" in log
    assert why in log
    assert run.alive() == []


def test_without_a_desk_the_agent_gives_up_at_the_deadline(run: Run) -> None:
    run.set_deadline("meet_s", 0.5)
    launcher = run.launcher("works")
    launcher.launch([request()])
    assert run.wait_ended(launcher) == EXIT_NOT_MET
    assert "[agent a0] waited 0.5 s for the rendezvous of" in run.log("agent-a0")


def test_a_joiner_that_does_not_end_is_killed_after_the_deadline(run: Run) -> None:
    run.set_deadline("meet_s", 2.0)
    launcher = run.launcher("works")
    with run.bell() as rung:
        launcher.launch([request()])
        assert rung.wait(15)
        for pid in (*run.joiners(), run.programs()["mpiexec"]):
            os.kill(pid, signal.SIGSTOP)
        assert run.wait_ended(launcher) == EXIT_NOT_MET
    waited = f"waited {2 + _MEET_MARGIN_S:g} s for the joiner to end"
    assert f"no meeting with the rendezvous: {waited}" in run.log("agent-a0")
    assert run.alive() == []


def test_a_worker_that_dies_during_the_meeting_fails_the_agent_at_once(run: Run) -> None:
    launcher = run.launcher("works")
    with run.bell() as rung:
        launcher.launch([request()])
        assert rung.wait(15)
        (worker, _) = [pid for pid in run.find(sys.executable, "-c") if pid not in run.agents()]
        os.kill(worker, signal.SIGKILL)
        assert run.wait_ended(launcher) == EXIT_BOOT
    assert "of agent a0 ended in boot (signal 9)" in run.log("agent-a0")
    assert run.alive() == []


def test_an_agent_told_to_stop_during_the_meeting_stops_at_once(run: Run) -> None:
    launcher = run.launcher("works")
    with run.bell() as rung:
        launcher.launch([request()])
        assert rung.wait(15)
        launcher.kill("a0")
        assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM: ending workers [0, 1]" in run.log("agent-a0")
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
        run.open_desk()
    with owned(run, "works" if booted else "never boots", *options) as owner:
        if booted:
            run.notes()
        else:
            wait_for(lambda: len(run.boots()) == 2, "workers to start")
        os.kill(owner.pid if victim == "owner" else run.agents()[0], signal.SIGKILL)
        wait_for(lambda: set(run.alive()) <= {owner.pid}, "the tree to end", 5.0)


@pytest.mark.parametrize("victim", ["owner", "agent", "mpiexec", "hydra_pmi_proxy", "joiner"])
def test_sigkill_of_any_process_in_the_meeting_leaves_nothing(run: Run, victim: str) -> None:
    with run.bell() as rung, owned(run, "works") as owner:
        assert rung.wait(15)
        (joiner,), (agent,) = run.joiners(), run.agents()
        pids = {**run.programs(), "owner": owner.pid, "agent": agent, "joiner": joiner}
        os.kill(pids[victim], signal.SIGKILL)
        wait_for(lambda: set(run.alive()) <= {owner.pid}, "the tree to end", 5.0)
    if victim not in ("owner", "agent"):
        said = "no meeting with the rendezvous: the joiner ended without an answer"
        assert said in run.log("agent-a0")
