"""Agents and their launchers: workers start, get their ids, and nothing survives its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from liver_hpc.agent import _MEET_MARGIN_S, EXIT_BOOT, worst
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.launcher import KILLED, Launcher, MemoryLauncher, NodeRequest
from liver_hpc.cluster.local import LocalLauncher
from liver_hpc.cluster.processes import kill_marked, marked_processes
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import (
    DeadlineSection,
    LayoutSection,
    RunConfig,
    TrainSection,
    WorkersSection,
)
from liver_hpc.errors import LiverError
from liver_hpc.rendezvous.joiner import EXIT_NOT_MET
from liver_hpc.rendezvous.meeting import Answer, Identity, Refusal
from liver_hpc.rendezvous.mpi import MpiFrontDesk
from liver_hpc.rendezvous.mpi_calls import EXIT_DESK_LOST, EXIT_STUCK, TURN, MeetingPlace
from liver_hpc.rendezvous.process_manager import NO_TOPOLOGY_FILE, under_mpiexec
from liver_hpc.rendezvous.secret import create_secret
from liver_hpc.rendezvous.wire import Wire, WireServer
from tests.integration.leftovers import no_abandoned_files

pytestmark = pytest.mark.timeout(60)

TEST_MARK = "LIVER_TEST_RUN"
DEADLINES = DeadlineSection(boot_s=20.0, meet_s=20.0, exit_s=1.0)

# Says that it has booted, reads its line, notes what it was given; then does as argv says.
WORKER = """
import json, os, signal, sys, threading
from pathlib import Path
directory, then = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["LIVER_LOCAL_RANK"]
if then == "boot fails" and rank == "1":
    sys.exit(3)
if then == "talks" and rank == "1":
    os.write(int(os.environ["LIVER_AGENT_WRITE_FD"]), b"hello there" + b"\\n")
if then in ("stubborn", "never boots"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if then == "stubborn" else signal.SIG_DFL)
    (directory / f"boots-{os.getpid()}").touch()
    threading.Event().wait()
if then.startswith("boot fails") or then == "talks":
    threading.Event().wait()
with open(int(os.environ["LIVER_AGENT_WRITE_FD"]), "w") as to_agent:
    to_agent.write(json.dumps({"booted": True}) + "\\n")
with open(int(os.environ["LIVER_AGENT_READ_FD"])) as from_agent:
    line = from_agent.readline()
note = {"told": json.loads(line), "pid": os.getpid(), "environment": dict(os.environ)}
draft = directory / f"draft-{os.getpid()}"
draft.write_text(json.dumps(note))
draft.rename(directory / f"worker-{rank}.json")
print("at work", flush=True)
if then == "ends":
    sys.exit(int(rank))
threading.Event().wait()
"""

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


def request(agent: str = "a0", workers: int = 2) -> NodeRequest:
    return NodeRequest(agent=agent, workers=workers, layout=f"tp1 pp1 dp{workers}")


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 15.0) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, what))


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


class Run:
    """A run directory, a mark by which all processes of the test are found, and a launcher."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory = directory
        self.mark = mark
        self.launchers: list[LocalLauncher] = []
        config = RunConfig(
            train=TrainSection(steps=1, global_batch=8),
            workers=WorkersSection(initial=2, max=8),
            layouts={2: [LayoutSection(dp=2)]},
            deadlines=DEADLINES,
        )
        (directory / "run.yaml").write_text(dump_run(config))
        self.secret = create_secret(directory / "secret")
        self.desk = MpiFrontDesk(directory, self.secret)

    def set_deadline(self, name: str, limit_s: float) -> None:
        text = (self.directory / "run.yaml").read_text()
        assert f"{name}: 20.0" in text
        (self.directory / "run.yaml").write_text(
            text.replace(f"{name}: 20.0", f"{name}: {limit_s}")
        )

    def options(self, then: str) -> list[str]:
        command = [sys.executable, "-c", WORKER, str(self.directory), then]
        return ["--worker-command", json.dumps(command)]

    def launcher(self, then: str, exit_s: float = 5.0) -> LocalLauncher:
        launcher = LocalLauncher(self.directory, exit_s, self.options(then))
        self.launchers.append(launcher)
        return launcher

    def open_desk(self, first_worker: int = 4) -> None:
        self.desk.start(
            lambda who: Answer(
                worker_ids=tuple(range(first_worker, first_worker + who.workers)),
                control_host="node0",
                control_port=4711,
            )
        )

    @contextmanager
    def bell(self, says: bytes = b"", then_hangs_up: bool = False) -> Iterator[threading.Event]:
        """A desk with a bell alone, where joiners wait, already in MPI; set once one has rung.

        The bell is silent or says one thing, and hangs up at once or at the end of the block. At
        its MPI port there is nobody.
        """
        rung = threading.Event()

        def ring(wire: Wire) -> None:
            if says:
                wire.send(says)
            rung.set()
            if not then_hangs_up:
                wire.receive()

        self.open_desk()
        place = MeetingPlace.read(self.directory)
        assert place is not None
        self.desk.close()
        self.desk = MpiFrontDesk(self.directory, self.secret)
        bell = WireServer("127.0.0.1", self.secret, ring)
        try:
            place.model_copy(update={"bell_port": bell.address[1]}).write(self.directory)
            yield rung
        finally:
            bell.close()

    def alive(self) -> list[int]:
        """Processes of this test, other than the test and the desk."""
        return [
            pid
            for pid in marked_processes(TEST_MARK, self.mark)
            if pid not in (os.getpid(), self.desk.pid)
        ]

    def find(self, *words: str) -> list[int]:
        """Living processes of this test with these words on their command line, in order."""

        def fits(pid: int) -> bool:
            line = command_line(pid)
            return any(line[at : at + len(words)] == list(words) for at in range(len(line)))

        return sorted(pid for pid in self.alive() if fits(pid))

    def agents(self) -> list[int]:
        return [pid for pid in self.find("-m", "liver_hpc.agent") if self.is_python(pid)]

    def joiners(self) -> list[int]:
        joiners = self.find("-m", "liver_hpc.rendezvous.joiner")
        return [pid for pid in joiners if self.is_python(pid)]

    def programs(self) -> dict[str, int]:
        """What runs, and one process id of each."""
        return {Path(command_line(pid)[0]).name: pid for pid in self.alive()}

    def listens(self) -> list[str]:
        """The TCP addresses at which this test's processes listen, the desk's aside."""
        ours = self.alive()
        return [
            f"{connection.laddr.ip}:{connection.laddr.port}"
            for connection in psutil.net_connections("tcp")
            if connection.pid in ours and connection.status == psutil.CONN_LISTEN
        ]

    def is_python(self, pid: int) -> bool:
        return command_line(pid)[0] == sys.executable

    def notes(self, count: int = 2) -> list[dict[str, object]]:
        """What the workers noted once they were at work, by local rank."""
        paths = [self.directory / f"worker-{rank}.json" for rank in range(count)]
        wait_for(lambda: all(path.exists() for path in paths), f"{count} workers at work")
        return [json.loads(path.read_text()) for path in paths]

    def boots(self) -> list[int]:
        """The process ids of workers that hang in their boot."""
        return [int(path.name.split("-")[1]) for path in self.directory.glob("boots-*")]

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()

    def wait_ended(self, launcher: Launcher, agent: str = "a0") -> int:
        wait_for(lambda: not launcher.alive(agent), f"agent {agent} to end")
        code = launcher.exit_code(agent)
        assert code is not None
        return code


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Whatever the test did: once closed, nothing of it lives, and no file of MPI's is left."""
    mark = str(tmp_path)
    monkeypatch.setenv(TEST_MARK, mark)
    made = Run(tmp_path, mark)
    try:
        with no_abandoned_files():
            yield made
            for launcher in made.launchers:
                launcher.close()
            made.desk.close()
            wait_for(lambda: not made.alive(), "all processes to end", 5.0)
    finally:
        made.desk.close()
        kill_marked(TEST_MARK, mark, 5.0)


# ---- every launcher


@pytest.fixture(params=["memory", "local"])
def launcher(request: pytest.FixtureRequest, run: Run) -> Launcher:
    return MemoryLauncher() if request.param == "memory" else run.launcher("never boots")


def test_launched_agents_live_until_they_are_killed(launcher: Launcher, run: Run) -> None:
    launcher.launch([request("a0"), request("a1")])
    assert launcher.alive("a0")
    assert launcher.exit_code("a0") is None
    launcher.kill("a0")
    launcher.kill("a0")
    assert run.wait_ended(launcher) != 0
    assert launcher.alive("a1")
    launcher.close()
    assert not launcher.alive("a1")
    launcher.close()


def test_a_name_is_launched_once(launcher: Launcher, run: Run) -> None:
    launcher.launch([request("a0")])
    with pytest.raises(LiverError, match=r"agents \['a0'\] were launched before"):
        launcher.launch([request("a1"), request("a0")])
    with pytest.raises(LiverError, match="'a1' was never launched"):
        launcher.alive("a1")
    launcher.kill("a0")
    run.wait_ended(launcher)
    with pytest.raises(LiverError, match="were launched before"):
        launcher.launch([request("a0")])
    with pytest.raises(LiverError, match="were launched before"):
        launcher.launch([request("a2"), request("a2")])


def test_unknown_agents_are_errors(launcher: Launcher) -> None:
    for question in (launcher.alive, launcher.exit_code, launcher.kill):
        with pytest.raises(LiverError, match="'ghost' was never launched"):
            question("ghost")


def test_nothing_is_launched_after_close(launcher: Launcher) -> None:
    launcher.close()
    with pytest.raises(LiverError, match="closed"):
        launcher.launch([request()])


def test_memory_launcher_starts_and_ends_agents_as_told() -> None:
    started: list[NodeRequest] = []
    launcher = MemoryLauncher(started.append)
    launcher.launch([request("a0"), request("a1")])
    assert started == [request("a0"), request("a1")]
    launcher.end("a0", 3)
    launcher.end("a0", 4)
    launcher.kill("a1")
    assert (launcher.exit_code("a0"), launcher.exit_code("a1")) == (3, KILLED)


# ---- an agent's life


def test_workers_get_their_ids_their_environment_and_their_logs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PMI_RANK", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    run.open_desk(first_worker=4)
    launcher = run.launcher("ends")
    launcher.launch([request()])
    for rank, note in enumerate(run.notes()):
        assert note["told"] == {"worker": 4 + rank, "host": "node0", "port": 4711}
        environment = note["environment"]
        assert isinstance(environment, dict)
        assert environment["LIVER_LOCAL_RANK"] == str(rank)
        assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("1", "3")
        assert environment["SLURM_CONF"] == "/etc/slurm.conf"
        foreign = ("PMI", "HYDI", "HWLOC", "SLURM_JOB")
        assert [name for name in environment if name.startswith(foreign)] == []
        assert run.log(f"worker-a0-{rank}") == "at work\n"
    assert run.wait_ended(launcher) == 1  # worker 1 ends with 1, worker 0 with 0
    log = run.log("agent-a0")
    assert "[agent a0] met the front desk: workers [4, 5]" in log
    assert "worker 1 ended: exit code 1" in log


def test_the_desk_learns_who_the_agent_is(run: Run) -> None:
    seen: list[Identity] = []

    def refuse(who: Identity) -> Refusal:
        seen.append(who)
        return Refusal(reason="not expected")

    run.desk.start(refuse)
    launcher = run.launcher("works")
    launcher.launch([request("burst-2", workers=3)])
    assert run.wait_ended(launcher, "burst-2") == EXIT_NOT_MET
    assert [(who.agent, who.workers, who.host) for who in seen] == [
        ("burst-2", 3, socket.gethostname())
    ]
    assert "agent burst-2 was refused: not expected" in run.log("agent-burst-2")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("boot fails", "worker 1 of agent a0 ended in boot (exit code 3)"),
        ("talks", "worker 1 of agent a0 said b'hello there\\n' instead of having booted"),
    ],
)
def test_a_worker_that_fails_in_boot_fails_the_agent_which_says_who(
    run: Run, then: str, said: str
) -> None:
    launcher = run.launcher(then)
    launcher.launch([request()])
    assert run.wait_ended(launcher) == EXIT_BOOT
    assert said in run.log("agent-a0")
    assert str(run.directory / "logs" / "worker-a0-1.log") in run.log("agent-a0")
    assert run.alive() == []


def test_a_worker_that_boots_too_slowly_fails_the_agent(run: Run) -> None:
    run.set_deadline("boot_s", 0.3)
    launcher = run.launcher("never boots")
    launcher.launch([request()])
    assert run.wait_ended(launcher) == EXIT_BOOT
    assert "waited 0.3 s for workers [0, 1] to boot" in run.log("agent-a0")


def test_one_workers_death_does_not_touch_the_others(run: Run) -> None:
    run.open_desk()
    launcher = run.launcher("works")
    launcher.launch([request(workers=3)])
    first, second, third = (note["pid"] for note in run.notes(3))
    assert isinstance(second, int)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: "worker 1 ended: signal 9" in run.log("agent-a0"), "the agent to notice")
    assert {first, third} <= set(run.alive())
    assert launcher.alive("a0")
    for pid in (first, third):
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGINT)
    assert run.wait_ended(launcher) == worst([-signal.SIGKILL, 1]) == KILLED


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_told_to_stop_ends_its_workers_and_says_so(
    run: Run, signum: signal.Signals
) -> None:
    run.open_desk()
    launcher = run.launcher("works")
    launcher.launch([request()])
    run.notes()
    (agent,) = run.agents()
    os.kill(agent, signum)
    assert run.wait_ended(launcher) == 128 + signum
    assert f"stopped by {signum.name}: ending workers [0, 1]" in run.log("agent-a0")


def test_a_worker_that_ignores_sigterm_is_killed_after_its_deadline(run: Run) -> None:
    launcher = run.launcher("stubborn", exit_s=10.0)
    launcher.launch([request()])
    wait_for(lambda: len(run.boots()) == 2, "workers to start")
    launcher.kill("a0")
    assert run.wait_ended(launcher) == 128 + signal.SIGTERM
    assert "worker 1 has not ended 1 s after SIGTERM" in run.log("agent-a0")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.3])
def test_an_agent_killed_while_it_starts_ends_at_once(run: Run, delay_s: float) -> None:
    launcher = run.launcher("never boots", exit_s=30.0)
    launcher.launch([request()])
    time.sleep(delay_s)
    launcher.kill("a0")
    wait_for(lambda: not launcher.alive("a0"), "the agent to end", 10.0)
    assert run.alive() == []


def test_an_agent_that_does_not_end_is_killed_by_its_launcher(run: Run) -> None:
    launcher = run.launcher("never boots", exit_s=0.5)
    launcher.launch([request()])
    wait_for(lambda: len(run.boots()) == 2, "workers to start")
    (agent,) = run.agents()
    os.kill(agent, signal.SIGSTOP)
    launcher.close()
    assert run.alive() == []


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
    agent = [sys.executable, "-m", "liver_hpc.agent", "--run-directory", str(run.directory)]
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
        (True, 20.0, EXIT_DESK_LOST, "[agent a0] connection to the front desk of"),
        (False, 2.0, EXIT_STUCK, "s for the front desk of"),
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
    assert "[agent a0] waited 0.5 s for the front desk of" in run.log("agent-a0")


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
    assert f"no meeting with the front desk: {waited}" in run.log("agent-a0")
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
def owned(run: Run, then: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own with a launcher that has launched an agent; killed at the end."""
    command = [sys.executable, "-c", OWNER, str(run.directory), *run.options(then)]
    with subprocess.Popen(command) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.parametrize("booted", [True, False], ids=["at work", "in boot"])
@pytest.mark.parametrize("victim", ["owner", "agent"])
def test_sigkill_of_any_process_above_the_workers_leaves_nothing(
    run: Run, victim: str, booted: bool
) -> None:
    if booted:
        run.open_desk()
    with owned(run, "works" if booted else "never boots") as owner:
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
        said = "no meeting with the front desk: the joiner ended without an answer"
        assert said in run.log("agent-a0")
