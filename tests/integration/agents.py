"""Agents under test: run directory, stand-in workers, rendezvous, control server that notes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.launcher import Launcher, local_launcher
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import (
    DeadlineSection,
    LayoutSection,
    NetworkSection,
    RunConfig,
    TrainSection,
    WorkersSection,
)
from liver_hpc.host.marks import marked_processes
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import AgentHello, AnyMessage, Calls, Hears, YourTurn
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.mpi.network import MpiNetwork, RendezvousPlace, place_file
from liver_hpc.rendezvous.mpi.service import Acceptor, MpiRendezvous
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from liver_hpc.run.secret import create_secret

M = TypeVar("M")

TEST_MARK = "LIVER_TEST_RUN"
DEADLINES = DeadlineSection(boot_s=20.0, meet_s=20.0, exit_s=1.0, coordinator_s=1.0)

# Says that it has booted, reads its line, notes what it was given; then does as argv says.
WORKER = """
import json, os, signal, struct, subprocess, sys, threading
from pathlib import Path
directory, then = Path(sys.argv[1]), sys.argv[2]
rank, agent = os.environ["LIVER_LOCAL_RANK"], int(os.environ["LIVER_AGENT_FD"])
def say(data):
    os.write(agent, struct.pack("!IB", len(data), 0) + data)
def hear():
    return os.read(agent, struct.unpack("!IB", os.read(agent, 5))[0])
if then in ("boot fails", "slot 1 fails") and rank == "1":
    sys.exit(3)
if then == "slot 1 hangs" and rank == "1":
    threading.Event().wait()
if then == "boot is refused" and rank == "1":
    say(b"PlanError: no")
    sys.exit(1)
if then == "talks" and rank == "1":
    say(b"hello there")
if then in ("stubborn", "never boots"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if then == "stubborn" else signal.SIG_DFL)
    (directory / f"boots-{os.getpid()}").touch()
    threading.Event().wait()
if then.startswith("boot fails") or then == "talks":
    threading.Event().wait()
say(b"booted")
line = hear()
note = {"told": json.loads(line), "pid": os.getpid(), "environment": dict(os.environ)}
if then == "deaf":
    for signum in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
if then == "has a child":
    subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
print("at work", flush=True)
draft = directory / f"draft-{os.getpid()}"
draft.write_text(json.dumps(note))
draft.rename(directory / f"worker-{rank}.json")
if then == "ends":
    sys.exit(int(rank))
threading.Event().wait()
"""


def request(agent: str = "a0", workers: int = 2) -> LaunchAgent:
    return LaunchAgent(agent, Seat("", tuple(range(workers))), Layout(1, 1, workers))


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 15.0) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, what))


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def listens(pid: int) -> list[str]:
    """Where a process listens over TCP, or has bound a socket of UDP."""
    try:
        sockets = psutil.Process(pid).net_connections("inet")
    except psutil.Error:
        return []
    return [
        f"{one.laddr.ip}:{one.laddr.port}"
        for one in sockets
        if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM
    ]


def acceptor_pid(rendezvous: MpiRendezvous) -> int | None:
    """The process id of its present acceptor; None while there is none."""
    acceptor = rendezvous._acceptor
    return None if acceptor is None else acceptor.pid


def dead_turn(directory: Path) -> YourTurn:
    """To meet at a port of MPI's at which there is nobody any more."""
    acceptor = Acceptor(MpiNetwork(), directory / "logs" / "dead.log")
    acceptor.close()
    return YourTurn(port_name=acceptor.port_name, mpi=acceptor.release)


@contextmanager
def queue_alone(
    directory: Path, secret: bytes, line_up: Callable[[Channel], None]
) -> Iterator[None]:
    """What a joiner finds of a rendezvous without an acceptor; `line_up` has each joiner."""
    queue = ControlServer("127.0.0.1", secret, line_up)
    place = RendezvousPlace(network=MpiNetwork(netmod="ofi"), port=queue.address[1])
    place_file(directory).write_text(place.model_dump_json())
    try:
        yield
    finally:
        place_file(directory).unlink()
        queue.close()


class Coordinator:
    """What agents say on their own channels. It hangs up on nobody until it is closed."""

    def __init__(self, secret: bytes) -> None:
        self.heard: list[AnyMessage] = []
        self.channels: dict[str, Channel] = {}
        self.gone: list[str] = []
        self._server = ControlServer("127.0.0.1", secret, self._serve)
        self.address = self._server.address
        self.close = self._server.close

    def _serve(self, channel: Channel) -> None:
        assert isinstance(channel.receive(10.0), Calls)
        channel.send(Hears(heard=0, epoch=1))
        hello = channel.receive(10.0)
        assert isinstance(hello, AgentHello)
        self.heard.append(hello)
        self.channels[hello.agent] = channel
        try:
            while True:
                self.heard.append(channel.receive())
        except ChannelClosed:
            self.gone.append(hello.agent)

    def wait_heard(self, kind: type[M], count: int = 1) -> list[M]:
        """The messages of one kind, once there are so many."""
        wait_for(lambda: len(self.said(kind)) >= count, f"{count} {kind.__name__}")
        return self.said(kind)

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]


class Run:
    """A run directory, a mark by which all processes of the test are found, and a launcher."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory = directory
        self.mark = mark
        self.launchers: list[Launcher] = []
        self._next_worker = 4
        config = RunConfig(
            train=TrainSection(steps=1, global_batch=8),
            workers=WorkersSection(initial=2, max=8),
            layouts={2: [LayoutSection(dp=2)]},
            deadlines=DEADLINES,
        )
        (directory / "run.yaml").write_text(dump_run(config))
        self.secret = create_secret(directory / "secret")
        self.rendezvous = MpiRendezvous(directory, self.secret, MpiNetwork())
        self.coordinator = Coordinator(self.secret)
        self.control = self.coordinator.address

    def set_deadline(self, name: str, limit_s: float) -> None:
        path = self.directory / "run.yaml"
        text, changed = re.subn(rf"\b{name}: [0-9.]+", f"{name}: {limit_s}", path.read_text())
        assert changed == 1
        path.write_text(text)

    def set_network(self, **given: str) -> None:
        path = self.directory / "run.yaml"
        config = load_run(path)
        network = NetworkSection(**given)  # type: ignore[arg-type]
        path.write_text(dump_run(config.model_copy(update={"network": network})))

    def set_cluster(self, **given: str) -> None:
        path = self.directory / "run.yaml"
        config = load_run(path)
        cluster = config.cluster.model_copy(update=given)
        path.write_text(dump_run(config.model_copy(update={"cluster": cluster})))

    def options(self, then: str) -> list[str]:
        command = [sys.executable, "-c", WORKER, str(self.directory), then]
        return ["--worker-command", json.dumps(command)]

    def launcher(
        self, then: str, exit_s: float = 5.0, options: Sequence[str] = (), stay: bool = False
    ) -> Launcher:
        further = [*options, *self.options(then)]
        launcher = local_launcher(self.directory, exit_s, further, stay=stay)
        self.launchers.append(launcher)
        return launcher

    def answer(self, who: Identity) -> Answer:
        first_worker, self._next_worker = self._next_worker, self._next_worker + who.workers
        return Answer(
            worker_ids=tuple(range(first_worker, first_worker + who.workers)),
            control_host=self.control[0],
            control_port=self.control[1],
        )

    def open_rendezvous(self) -> None:
        self.rendezvous.start(self.answer)

    @contextmanager
    def queue(
        self, tells: YourTurn | None = None, then_hangs_up: bool = False
    ) -> Iterator[threading.Event]:
        """A rendezvous with a queue alone, where joiners wait, already in MPI; set once one does.

        It may tell how to meet, and hang up at once.
        """
        came = threading.Event()

        def line_up(joiner: Channel) -> None:
            if tells is not None:
                joiner.send(tells)
            came.set()
            if not then_hangs_up:
                joiner.receive()

        with queue_alone(self.directory, self.secret, line_up):
            yield came

    def alive(self) -> list[int]:
        """Processes of this test, other than the test and the acceptor."""
        return [
            pid
            for pid in marked_processes(TEST_MARK, self.mark)
            if pid not in (os.getpid(), acceptor_pid(self.rendezvous))
        ]

    def find(self, *words: str) -> list[int]:
        """Living processes of this test with these words on their command line, in order."""

        def fits(pid: int) -> bool:
            line = command_line(pid)
            return any(line[at : at + len(words)] == list(words) for at in range(len(line)))

        return sorted(pid for pid in self.alive() if fits(pid))

    def agents(self) -> list[int]:
        return [pid for pid in self.find("-m", "liver_hpc.node.agent") if self.is_python(pid)]

    def joiners(self) -> list[int]:
        joiners = self.find("liver_hpc.rendezvous.mpi.endpoint", "connect")
        return [pid for pid in joiners if self.is_python(pid)]

    def joiner(self) -> int:
        """The process id of the joiner that there is, once it is in MPI."""
        wait_for(lambda: any(map(listens, self.joiners())), "a joiner in MPI")
        (joiner,) = self.joiners()
        return joiner

    def listens(self) -> list[str]:
        """The addresses at which anything of this test can be reached, the test itself included."""
        ours = marked_processes(TEST_MARK, self.mark)
        return [address for pid in (os.getpid(), *ours) for address in listens(pid)]

    def is_python(self, pid: int) -> bool:
        return command_line(pid)[0] == sys.executable

    def notes(self, ranks: Sequence[int] = (0, 1)) -> list[dict[str, object]]:
        """What the workers noted once they were at work, by local rank."""
        paths = [self.directory / f"worker-{rank}.json" for rank in ranks]
        wait_for(lambda: all(path.exists() for path in paths), f"workers {ranks} at work")
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
