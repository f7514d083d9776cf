"""The rendezvous: one conformance suite for both, and what only real processes and MPI can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError, LiverError, MeetingError
from liver_hpc.rendezvous.base import (
    Answer,
    Identity,
    Refusal,
    Rendezvous,
)
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.rendezvous.mpi import service
from liver_hpc.rendezvous.mpi.joiner import RendezvousLost, StuckInMpi, joiner_process, meet
from liver_hpc.rendezvous.mpi.network import MpiNetwork, RendezvousPlace, place_file
from liver_hpc.rendezvous.mpi.process import ENDPOINT, MpiProcess
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
from tests.integration.agents import acceptor_pid, dead_turn, queue_alone
from tests.integration.leftovers import no_abandoned_files
from tests.memory_rendezvous import MemoryRendezvous

pytestmark = pytest.mark.timeout(90)

SECRET = b"s" * 32
WRONG = b"w" * 32

# A joiner that, step by step, gets as far as it is told and then dies or stands still. It may
# introduce itself under another key than that of its place in the queue.
BAD_JOINER = """
import json, os, signal, sys, threading
from multiprocessing.connection import Connection
from liver_hpc.rendezvous.base import Identity, introduction
from liver_hpc.rendezvous.channel import connect
host, port, end, how, secret, key, line = sys.argv[1:8]

def reach(step):
    if step != end:
        return
    parent.send_bytes(step.encode())
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

parent = Connection(int(line))
os.environ.update(json.loads(parent.recv_bytes()))
from liver_hpc.rendezvous.mpi.calls import MPI, receive, send, start_mpi
start_mpi()
wire = connect((host, int(port)), bytes.fromhex(secret), 20.0, "the rendezvous")
port_name = wire.receive(20.0).port_name
reach("turn")
peer = MPI.COMM_SELF.Connect(port_name)
reach("connected")
who = Identity(agent="bad", host="here", workers=2)
send(peer, introduction(bytes.fromhex(key) or wire.key, who))
reach("introduced")
receive(peer)
reach("answered")
peer.Disconnect()
reach("left")
"""

# Enters MPI as MPICH alone does, says by which segment of shared memory, and stays.
BARE_MPI = """
import re, sys, threading
from multiprocessing.connection import Connection
from pathlib import Path
from mpi4py import MPI
MPI.Init()
maps = Path("/proc/self/maps").read_text()
(segment,) = set(re.findall(r"/dev/shm/mpich\\S+", maps))
Connection(int(sys.argv[1])).send_bytes(segment.encode())
threading.Event().wait()
"""

OTHER_LIBRARY = """
from liver_hpc.rendezvous.mpi import calls
calls.MPI.get_vendor = lambda: ("Open MPI", (4, 1, 6))
calls.start_mpi()
"""

# mpi4py then asks the loader alone, as it does where Python's prefix is /usr.
NO_RPATH = """
import mpi4py._mpiabi
mpi4py._mpiabi._dlopen_rpath = lambda: [""]
"""

# Longer than a turn.
SLOW_MPI = """
import sys, time
class Slow:
    def find_spec(self, name, *rest):
        if name == "mpi4py":
            time.sleep(3.0)
sys.meta_path.insert(0, Slow())
"""

OWNER = """
import sys, threading
from pathlib import Path
from liver_hpc.rendezvous.base import Refusal
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
rendezvous = MpiRendezvous(Path(sys.argv[1]), b"s" * 32, MpiNetwork())
rendezvous.start(lambda identity: Refusal(reason="nobody"))
print(rendezvous._acceptor.pid, flush=True)
threading.Event().wait()
"""


def identity(agent: str = "a0") -> Identity:
    return Identity(agent=agent, host="here", workers=2)


@dataclass
class Coordinator:
    """Gives ids in the order in which joiners come; refuses those it is told to."""

    met: list[Identity] = field(default_factory=list)
    unwanted: str = ""

    def answer(self, who: Identity) -> Answer | Refusal:
        if who.agent == self.unwanted:
            return Refusal(reason="not expected")
        if who.agent == "explosive":
            raise LiverError("the books do not balance")
        if who.agent == "a fault":
            raise KeyError(who.agent)
        self.met.append(who)
        first = 2 * (len(self.met) - 1)
        return Answer(worker_ids=(first, first + 1), control_host="node0", control_port=4711)


class Place(ABC):
    """A rendezvous under test and a way to come to it."""

    rendezvous: Rendezvous

    @abstractmethod
    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        """Comes as `agent`. Raises MeetingError."""


class MemoryPlace(Place):
    def __init__(self) -> None:
        self.rendezvous: MemoryRendezvous = MemoryRendezvous(SECRET)

    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        return self.rendezvous.meet(identity(agent), secret)


class MpiPlace(Place):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rendezvous: MpiRendezvous = MpiRendezvous(directory, SECRET, MpiNetwork())

    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        return start_joiner(self.directory, agent, secret).result()

    def bad_joiner(self, end: str, how: str = "die", key: bytes = b"") -> MpiProcess:
        place = RendezvousPlace.read(self.directory)
        assert place is not None
        address = (place.network.host, str(place.port))
        process = mpi_process(BAD_JOINER, *address, end, how, SECRET.hex(), key.hex())
        process.enter(place.network)
        return process


STARTED: list[MpiProcess] = []
JOINERS = ThreadPoolExecutor()


def mpi_process(script: str, *arguments: str) -> MpiProcess:
    process = MpiProcess("an MPI process", ["-c", script, *arguments])
    STARTED.append(process)
    return process


def start_joiner(
    directory: Path, agent: str, secret: bytes = SECRET, meet_s: float = 20.0
) -> Future[Answer]:
    who = identity(agent)
    return JOINERS.submit(meet, joiner_process(), directory, who, secret, 20.0, meet_s)


def said(process: MpiProcess) -> str:
    return process.hear(Deadline.after(SystemClock(), 20.0, process.name)).decode()


def wait_until_gone(pid: int) -> None:
    deadline = Deadline.after(SystemClock(), 10.0, f"process {pid} to end")
    poll_until(lambda: not is_running(pid), deadline)


def is_running(pid: int) -> bool:
    """A zombie, which its parent has yet to wait for, does not run, unless threads of it do."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    state, *others = status.rpartition(")")[2].split()
    threads = int(others[16])
    return state not in "ZX" or threads > 1


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No test leaves MPI's shared memory, the rendezvous's file or its process behind."""
    with no_abandoned_files():
        yield
        while STARTED:
            STARTED.pop().close()
    assert not list(tmp_path.glob("*rendezvous.json*"))
    lines = [child.cmdline() for child in psutil.Process().children() if child.is_running()]
    assert not [line for line in lines if ENDPOINT[1] in line]


@contextmanager
def opened(place: Place, coordinator: Coordinator) -> Iterator[None]:
    try:
        place.rendezvous.start(coordinator.answer)
        yield
    finally:
        place.rendezvous.close()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture(params=["memory", "mpi"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, coordinator: Coordinator
) -> Iterator[Place]:
    made: Place = MemoryPlace() if request.param == "memory" else MpiPlace(tmp_path)
    with opened(made, coordinator):
        yield made


@pytest.fixture
def mpi_place(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MpiPlace]:
    monkeypatch.setattr(service, "TURN_S", 2.0)
    made = MpiPlace(tmp_path)
    with opened(made, coordinator):
        yield made


# ---- every rendezvous


def test_joiners_are_met_one_after_the_other(place: Place, coordinator: Coordinator) -> None:
    for number in range(3):
        answer = place.join(f"a{number}")
        assert answer.worker_ids == (2 * number, 2 * number + 1)
        assert (answer.control_host, answer.control_port) == ("node0", 4711)
    assert coordinator.met == [identity("a0"), identity("a1"), identity("a2")]
    place.rendezvous.check()


def test_a_refused_joiner_learns_why_and_the_next_is_met(
    place: Place, coordinator: Coordinator
) -> None:
    coordinator.unwanted = "a0"
    with pytest.raises(MeetingError, match="agent a0 was refused: not expected"):
        place.join("a0")
    with pytest.raises(MeetingError, match="the books do not balance"):
        place.join("explosive")
    assert place.join("a1").worker_ids == (0, 1)
    place.rendezvous.check()


def test_a_joiner_with_another_secret_is_refused_and_the_next_is_met(
    place: Place, coordinator: Coordinator
) -> None:
    with pytest.raises(MeetingError, match="do not hold the same secret"):
        place.join("a0", WRONG)
    assert coordinator.met == []
    assert place.join("a1").worker_ids == (0, 1)
    place.rendezvous.check()


def test_closing_twice_is_closing(place: Place) -> None:
    place.rendezvous.close()
    place.rendezvous.close()


def test_memory_rendezvous_that_broke_down_meets_nobody_and_says_so() -> None:
    rendezvous = MemoryRendezvous(SECRET)
    rendezvous.start(Coordinator().answer)
    rendezvous.break_down("out of ink")
    with pytest.raises(MeetingError, match="out of ink"):
        rendezvous.check()
    with pytest.raises(MeetingError, match="closed"):
        rendezvous.meet(identity(), SECRET)


# ---- over MPI


def test_joiners_that_come_together_are_all_met(
    mpi_place: MpiPlace, coordinator: Coordinator
) -> None:
    joiners = [start_joiner(mpi_place.directory, f"a{number}") for number in range(3)]
    ids = sorted(worker for joiner in joiners for worker in joiner.result().worker_ids)
    assert ids == list(range(6))


def test_an_acceptor_that_has_met_its_most_is_replaced_and_nobody_notices(
    tmp_path: Path,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MPICH has 1,024 places for worlds, and aborts for want of another one."""
    monkeypatch.setattr(service, "MOST_MEETINGS", 2)
    place = MpiPlace(tmp_path)
    seen: list[int | None] = []

    def answer(who: Identity) -> Answer | Refusal:
        seen.append(acceptor_pid(place.rendezvous))
        return coordinator.answer(who)

    place.rendezvous.start(answer)
    try:
        ids = [place.join(f"a{number}").worker_ids for number in range(5)]
        with place.rendezvous._turn:  # the last one's is over
            assert "broke off" not in caplog.text
    finally:
        place.rendezvous.close()
    assert ids == [(first, first + 1) for first in range(0, 10, 2)]
    assert seen[0] == seen[1] != seen[2] == seen[3] != seen[4]


def test_a_meeting_counts_whose_mpi_processes_do_not_end(
    mpi_place: MpiPlace,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All was said; what is stuck in the kernel takes no launch with it, and no queue."""
    end = MpiProcess.end

    def stuck(process: MpiProcess, limit_s: float) -> NoReturn:
        end(process, limit_s)
        raise DeadlineError(f"waited 5 s for killed processes [{process.pid}] to end")

    monkeypatch.setattr(MpiProcess, "end", stuck)
    for number in range(2):
        assert mpi_place.join(f"a{number}").worker_ids == (2 * number, 2 * number + 1)
    mpi_place.rendezvous.close()
    assert caplog.text.count("waited 5 s for killed processes") >= 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_coordinator_that_fails_over_one_joiner_still_meets_the_next(
    mpi_place: MpiPlace, coordinator: Coordinator
) -> None:
    with pytest.raises(RendezvousLost, match="has ended"):
        mpi_place.join("a fault")
    assert mpi_place.join("a1").worker_ids == (0, 1)


def test_a_secret_that_opens_the_queue_alone_does_not_pass_at_the_acceptor(
    mpi_place: MpiPlace, coordinator: Coordinator
) -> None:
    before = acceptor_pid(mpi_place.rendezvous)
    mpi_place.bad_joiner("left", key=WRONG).wait(30)
    assert mpi_place.join("a0").worker_ids == (0, 1)
    assert coordinator.met == [identity("a0")]
    assert acceptor_pid(mpi_place.rendezvous) == before


@pytest.mark.parametrize("end", ["turn", "connected", "introduced", "answered", "left"])
def test_a_joiner_that_dies_in_the_meeting_takes_nobody_with_it(
    mpi_place: MpiPlace, end: str
) -> None:
    mpi_place.bad_joiner(end).wait(30)
    assert len(mpi_place.join("a1").worker_ids) == 2
    mpi_place.rendezvous.check()


def test_joiners_wait_their_turn_while_another_stands_still_in_the_meeting(
    mpi_place: MpiPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait in the queue, not in MPI: the acceptor that is given up is followed by another."""
    stuck = mpi_place.bad_joiner("connected", "stand still")
    assert said(stuck) == "connected"
    before = acceptor_pid(mpi_place.rendezvous)
    assert mpi_place.join("a1").worker_ids == (0, 1)
    assert acceptor_pid(mpi_place.rendezvous) != before
    assert "a meeting broke off: waited 2 s for the joiner from 127.0.0.1" in caplog.text


def test_the_wait_for_those_before_it_is_no_part_of_a_joiners_meeting(mpi_place: MpiPlace) -> None:
    with mpi_place.rendezvous._turn:
        joiner = start_joiner(mpi_place.directory, "a0", meet_s=2.0)
        time.sleep(3.0)
    assert joiner.result().worker_ids == (0, 1)


def test_a_joiner_whose_mpi_is_slow_to_come_queues_once_it_is_there(
    mpi_place: MpiPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a file system that a thousand nodes read; its turn would have been over."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_MPI)
    monkeypatch.setenv("PYTHONPATH", str(slow))
    assert mpi_place.join("a0").worker_ids == (0, 1)


def test_a_joiner_whose_turn_does_not_come_gives_up(mpi_place: MpiPlace) -> None:
    who, directory = identity(), mpi_place.directory
    with mpi_place.rendezvous._turn, pytest.raises(MeetingError, match=r"waited 0\.5 s for the"):
        meet(joiner_process(), directory, who, SECRET, 0.5, 20.0)


def test_an_acceptor_killed_in_a_meeting_is_replaced_and_those_who_wait_are_met(
    mpi_place: MpiPlace,
) -> None:
    stuck = mpi_place.bad_joiner("turn", "stand still")
    assert said(stuck) == "turn"
    waiting = start_joiner(mpi_place.directory, "a1")
    before = acceptor_pid(mpi_place.rendezvous)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert waiting.result().worker_ids == (0, 1)
    mpi_place.rendezvous.check()
    wait_until_gone(before)


def test_an_acceptor_killed_between_meetings_is_replaced_for_the_next_joiner(
    mpi_place: MpiPlace,
) -> None:
    before = acceptor_pid(mpi_place.rendezvous)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until_gone(before)
    assert mpi_place.join("a0").worker_ids == (0, 1)
    assert acceptor_pid(mpi_place.rendezvous) != before


@pytest.mark.parametrize("told", ["MPICH_ASYNC_PROGRESS", "MPIR_CVAR_ASYNC_PROGRESS"])
def test_an_idle_rendezvous_uses_no_processor_time(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv(told, "1")
    place = MpiPlace(tmp_path)

    def ticks() -> int:
        stat = Path(f"/proc/{acceptor_pid(place.rendezvous)}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with opened(place, coordinator):
        place.join("a0")
        assert acceptor_pid(place.rendezvous) is not None
        before = ticks()
        time.sleep(0.5)
        assert ticks() - before <= 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_rendezvous_whose_mpi_does_not_start_says_where_to_look(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no-such-library")
    rendezvous = MpiRendezvous(tmp_path, SECRET, MpiNetwork())
    rendezvous.start(coordinator.answer)
    with pytest.raises(MeetingError, match=r"the acceptor, process \d+, has ended.*; see .*\.log"):
        rendezvous.check()
    assert (tmp_path / "logs" / "rendezvous.log").read_text()
    monkeypatch.delenv("MPI4PY_LIBMPI")
    until = rendezvous._broken_until
    assert until is not None
    rendezvous._broken_until = replace(until, at_s=0.0)  # that time has passed
    assert start_joiner(tmp_path, "a0").result().worker_ids == (0, 1)
    rendezvous.check()
    rendezvous.close()


def test_they_meet_where_python_finds_no_library_and_the_machine_has_others(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a distribution's Python, beside modules that bring an MPI and a libfabric."""
    others = tmp_path / "others"
    others.mkdir()
    for name in ("libmpi.so", "libmpi.so.12", "libfabric.so.1", "libucp.so.0"):
        (others / name).touch()
    (others / "sitecustomize.py").write_text(NO_RPATH)
    monkeypatch.setenv("PYTHONPATH", str(others))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(others))
    with opened(place := MpiPlace(tmp_path), coordinator):
        assert place.join("a0").worker_ids == (0, 1)


@pytest.mark.parametrize("told", ["MPICH_CH4_NUM_VCIS=4", "MPI4PY_RC_INITIALIZE=1"])
def test_they_meet_whatever_the_environment_has_for_other_mpi_programs(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """And, as after every test here, nothing is left of it."""
    monkeypatch.setenv(*told.split("="))
    with opened(place := MpiPlace(tmp_path), coordinator):
        assert place.join("a0").worker_ids == (0, 1)


def test_why_mpi_cannot_be_loaded_is_told_on_both_sides(
    tmp_path: Path,
    mpi_place: MpiPlace,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libnone.so"))
    why = r"process \d+, has ended: MPI cannot be loaded \(.*libnone\.so.*\); pip install"
    with pytest.raises(MeetingError, match=f"the joiner, {why}"):
        mpi_place.join("a0")
    (tmp_path / "other").mkdir()
    other = MpiRendezvous(tmp_path / "other", SECRET, MpiNetwork())
    other.start(coordinator.answer)
    with pytest.raises(MeetingError, match=f"the acceptor, {why}"):
        other.check()
    other.close()


def test_a_rendezvous_at_an_address_that_is_not_this_hosts_says_so(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    rendezvous = MpiRendezvous(tmp_path, SECRET, MpiNetwork(host="203.0.113.9"))
    with pytest.raises(MeetingError, match=r"cannot queue at 203\.0\.113\.9: Cannot assign"):
        rendezvous.start(coordinator.answer)
    assert acceptor_pid(rendezvous) is None


def test_a_rendezvous_whose_acceptors_do_not_open_any_more_is_broken(
    mpi_place: MpiPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no-such-library")
    acceptor = acceptor_pid(mpi_place.rendezvous)
    assert acceptor is not None
    os.kill(acceptor, signal.SIGKILL)
    wait_until_gone(acceptor)
    place = RendezvousPlace.read(mpi_place.directory)
    assert place is not None
    for _ in range(4):  # each is tried for twice, and turned away
        with pytest.raises(ChannelClosed):
            connect((place.network.host, place.port), SECRET, 5.0, "the rendezvous").receive(20.0)
    broken = r"broken; acceptors that did not open in a row: 6; .* see .*rendezvous\.log"
    with pytest.raises(MeetingError, match=broken):
        mpi_place.rendezvous.check()
    until = mpi_place.rendezvous._broken_until
    assert until is not None
    assert 0 < until.remaining_s() < until.limit_s == 30.0
    mpi_place.rendezvous._broken_until = replace(until, at_s=0.0)  # that time has passed
    mpi_place.rendezvous.check()
    with pytest.raises(ChannelClosed):
        connect((place.network.host, place.port), SECRET, 5.0, "the rendezvous").receive(20.0)
    with pytest.raises(MeetingError, match=broken):  # it was one attempt
        mpi_place.rendezvous.check()
    monkeypatch.delenv("MPI4PY_LIBMPI")
    mpi_place.rendezvous._broken_until = replace(until, at_s=0.0)
    assert mpi_place.join("a0").worker_ids == (0, 1)
    mpi_place.rendezvous.check()
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no-such-library")
    acceptor = acceptor_pid(mpi_place.rendezvous)
    assert acceptor is not None
    os.kill(acceptor, signal.SIGKILL)
    wait_until_gone(acceptor)
    with pytest.raises(ChannelClosed):
        connect((place.network.host, place.port), SECRET, 5.0, "the rendezvous").receive(20.0)
    mpi_place.rendezvous.check()  # these are not in a row with those before


def test_the_acceptor_dies_with_the_coordinator(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner:
        acceptor = int(owner.stdout.readline())
        assert is_running(acceptor)
        owner.kill()
    wait_until_gone(acceptor)
    place_file(tmp_path).unlink()  # nobody is left to do it


def test_closing_ends_the_acceptor_and_takes_the_file_away(mpi_place: MpiPlace) -> None:
    acceptor = acceptor_pid(mpi_place.rendezvous)
    assert acceptor is not None
    assert place_file(mpi_place.directory).stat().st_mode & 0o777 == 0o600
    mpi_place.rendezvous.close()
    assert not is_running(acceptor)
    assert not place_file(mpi_place.directory).exists()


def test_closing_in_the_middle_of_a_meeting_does_not_wait_for_it(mpi_place: MpiPlace) -> None:
    assert said(mpi_place.bad_joiner("connected", "stand still")) == "connected"
    began_s = time.monotonic()
    mpi_place.rendezvous.close()
    assert time.monotonic() - began_s < 1.5  # a turn lasts 2 s


# ---- the joiner's deadlines


def test_the_joiner_goes_by_the_netmod_of_the_rendezvous_whatever_the_environment_says(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ofi")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")  # it complains on standard output
    rendezvous = MpiRendezvous(tmp_path, SECRET, MpiNetwork(netmod="ucx"))
    rendezvous.start(coordinator.answer)
    try:
        place = RendezvousPlace.read(tmp_path)
        assert place is not None
        assert place.network.netmod == "ucx"
        assert start_joiner(tmp_path, "a0").result().worker_ids == (0, 1)
    finally:
        rendezvous.close()


def test_without_a_rendezvous_the_joiner_gives_up_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(MeetingError, match=r"waited 0\.2 s for the rendezvous of"):
        meet(joiner_process(), tmp_path, identity(), SECRET, 20.0, 0.2)


def test_at_the_address_of_a_dead_rendezvous_the_joiner_gives_up_at_its_deadline(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with opened(MpiPlace(tmp_path), coordinator):
        left_over = place_file(tmp_path).read_text()
    place_file(tmp_path).write_text(left_over)
    joiner = start_joiner(tmp_path, "a0", meet_s=1.0)
    with pytest.raises(MeetingError, match="the rendezvous of"):
        joiner.result()
    place_file(tmp_path).unlink()


@pytest.mark.parametrize("rendezvous_ends", [True, False])
def test_a_joiner_stuck_in_mpi_ends_with_the_rendezvous_or_at_its_deadline(
    tmp_path: Path, rendezvous_ends: bool
) -> None:
    """It is told a port name at which there is nobody any more."""
    ended = threading.Event()
    turn = dead_turn(tmp_path)

    def line_up(joiner: Channel) -> None:
        joiner.send(turn)
        try:
            joiner.receive(0.5 if rendezvous_ends else None)
        except (DeadlineError, ChannelClosed):
            ended.set()

    with queue_alone(tmp_path, SECRET, line_up):
        joiner = start_joiner(tmp_path, "a0", meet_s=30.0 if rendezvous_ends else 2.0)
        with pytest.raises(RendezvousLost if rendezvous_ends else StuckInMpi):
            joiner.result(20)
        assert ended.wait(5)


def test_a_joiner_whose_mpi_is_of_another_release_is_refused_by_name(tmp_path: Path) -> None:
    turn = dead_turn(tmp_path)
    other = turn.model_copy(update={"mpi": "MPICH Version: 3.4.2"})

    def line_up(joiner: Channel) -> None:
        joiner.send(other)
        with suppress(ChannelClosed):
            joiner.receive()

    with queue_alone(tmp_path, SECRET, line_up):
        joiner = start_joiner(tmp_path, "a0", meet_s=10.0)
        told = f"here is '{turn.mpi}', the coordinator's '{other.mpi}': .* install the same release"
        with pytest.raises(MeetingError, match=told):
            joiner.result(20)


# ---- shared memory


def test_a_process_killed_in_its_initialisation_leaves_no_shared_memory() -> None:
    """MPICH's own name for it is known beforehand, for the end of a process that cannot unlink."""
    process = mpi_process(BARE_MPI)
    segment = Path(said(process))
    assert segment.exists()
    process.end(0.0)
    assert not segment.exists()


def test_a_library_that_cannot_connect_two_jobs_is_refused_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OTHER_LIBRARY], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    *_, told = ended.stderr.splitlines()
    assert "MeetingError: mpi4py has loaded Open MPI 4.1.6" in told
    assert "wanted MPICH" in told
