"""Front desks: one conformance suite for both, and what only real processes and MPI can do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError, LiverError, MeetingError
from liver_hpc.host.environment import clean_environment
from liver_hpc.rendezvous.base import (
    Answer,
    Identity,
    MemoryRendezvous,
    Refusal,
    Rendezvous,
)
from liver_hpc.rendezvous.mpi.calls import (
    EXIT_DESK_LOST,
    EXIT_STUCK,
    TURN,
    MeetingPlace,
    port_file,
)
from liver_hpc.rendezvous.mpi.joiner import meet
from liver_hpc.rendezvous.mpi.process_manager import NO_TOPOLOGY_FILE, under_mpiexec
from liver_hpc.rendezvous.mpi.service import DeskPlace, MpiRendezvous
from liver_hpc.rendezvous.wire import ChannelClosed, Wire, WireServer
from tests.integration.leftovers import no_abandoned_files

pytestmark = pytest.mark.timeout(90)

SECRET = b"s" * 32
WRONG = b"w" * 32

# A joiner that is told its secret: the only process of an MPI world. Prints what came of it.
JOINER = """
import json, sys
from pathlib import Path
from liver_hpc.errors import LiverError
from liver_hpc.rendezvous.mpi.joiner import meet
from liver_hpc.rendezvous.base import Identity
directory, agent, secret, timeout_s = sys.argv[1:5]
identity = Identity(agent=agent, host="here", pid=1, workers=2)
try:
    answer = meet(Path(directory), identity, bytes.fromhex(secret), float(timeout_s))
    print(answer.model_dump_json())
except LiverError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""

# A joiner that, step by step, gets as far as it is told and then dies or stands still. It may
# ring the bell with one secret and introduce itself with another.
BAD_JOINER = """
import os, signal, sys, threading
from pathlib import Path
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.rendezvous.mpi import calls
from liver_hpc.rendezvous.base import Identity, joiner_dialogue
from liver_hpc.rendezvous.mpi.joiner import _wait_for_turn
directory, end, how, bell_secret, secret = sys.argv[1:6]

def reach(step):
    if step != end:
        return
    print(step, flush=True)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()

deadline = Deadline.after(SystemClock(), 20.0, "the desk")
calls.start_mpi(calls.MeetingPlace.read(Path(directory)).bell_host)
wire, place = _wait_for_turn(Path(directory), bytes.fromhex(bell_secret), deadline)
reach("turn")
line = calls.MpiPeer(calls.connect(place.mpi_port, 20.0), deadline, threading.Event())
reach("connected")
dialogue = joiner_dialogue(Identity(agent="bad", host="here", pid=1, workers=2),
                           bytes.fromhex(secret))
next(dialogue)
introduction = dialogue.send(line.receive())
line.send(introduction)
reach("introduced")
next(dialogue)
try:
    dialogue.send(line.receive())
except StopIteration:
    reach("answered")
line.leave()
reach("left")
"""

DESK_OWNER = """
import sys, threading
from pathlib import Path
from liver_hpc.rendezvous.base import Refusal
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
desk = MpiRendezvous(Path(sys.argv[1]), b"s" * 32)
desk.start(lambda identity: Refusal(reason="nobody"))
print(desk.pid, flush=True)
threading.Event().wait()
"""


def identity(agent: str = "a0") -> Identity:
    return Identity(agent=agent, host="here", pid=1, workers=2)


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
        self.met.append(who)
        first = 2 * (len(self.met) - 1)
        return Answer(worker_ids=(first, first + 1), control_host="node0", control_port=4711)


class Place(ABC):
    """A desk under test and a way to come to it."""

    desk: Rendezvous

    @abstractmethod
    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        """Comes to the desk as `agent`. Raises MeetingError."""


class MemoryPlace(Place):
    def __init__(self) -> None:
        self.desk: MemoryRendezvous = MemoryRendezvous(SECRET)

    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        return self.desk.meet(identity(agent), secret)


class MpiPlace(Place):
    def __init__(self, directory: Path, turn_s: float = 10.0) -> None:
        self.directory = directory
        self.desk: MpiRendezvous = MpiRendezvous(directory, SECRET, turn_s=turn_s)

    def join(self, agent: str, secret: bytes = SECRET) -> Answer:
        return result(start_joiner(self.directory, agent, secret))

    def bad_joiner(
        self, end: str, how: str = "die", secret: bytes = SECRET
    ) -> subprocess.Popen[str]:
        return mpi_process(BAD_JOINER, str(self.directory), end, how, SECRET.hex(), secret.hex())


def mpi_process(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        under_mpiexec([sys.executable, "-c", script, *arguments]),
        env={**clean_environment(os.environ), **NO_TOPOLOGY_FILE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def start_joiner(
    directory: Path, agent: str, secret: bytes = SECRET, timeout_s: float = 20.0
) -> subprocess.Popen[str]:
    return mpi_process(JOINER, str(directory), agent, secret.hex(), str(timeout_s))


def result(joiner: subprocess.Popen[str]) -> Answer:
    output, _ = joiner.communicate(timeout=60)
    said = json.loads(output)
    if "error" in said:
        raise {"MeetingError": MeetingError, "DeadlineError": DeadlineError}[said["error"]](
            said["text"]
        )
    return Answer.model_validate(said)


def wait_until_gone(pid: int) -> None:
    deadline = Deadline.after(SystemClock(), 10.0, f"process {pid} to end")
    poll_until(lambda: not is_running(pid), deadline)


def is_running(pid: int) -> bool:
    """A zombie, which its parent has yet to wait for, does not run."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No test leaves MPI's shared memory, a port file or a desk's process behind."""
    with no_abandoned_files():
        yield
    assert not list(tmp_path.glob("mpi-port*"))
    ours = str(tmp_path).encode()
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if ours in read(path) and b"rendezvous" in read(path)
    ]
    assert not left


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextmanager
def opened(place: Place, coordinator: Coordinator) -> Iterator[None]:
    try:
        place.desk.start(coordinator.answer)
        yield
    finally:
        place.desk.close()


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
def mpi_place(tmp_path: Path, coordinator: Coordinator) -> Iterator[MpiPlace]:
    made = MpiPlace(tmp_path, turn_s=2.0)
    with opened(made, coordinator):
        yield made


# ---- every rendezvous


def test_joiners_are_met_one_after_the_other(place: Place, coordinator: Coordinator) -> None:
    for number in range(3):
        answer = place.join(f"a{number}")
        assert answer.worker_ids == (2 * number, 2 * number + 1)
        assert (answer.control_host, answer.control_port) == ("node0", 4711)
    assert coordinator.met == [identity("a0"), identity("a1"), identity("a2")]
    place.desk.check()


def test_a_refused_joiner_learns_why_and_the_next_is_met(
    place: Place, coordinator: Coordinator
) -> None:
    coordinator.unwanted = "a0"
    with pytest.raises(MeetingError, match="agent a0 was refused: not expected"):
        place.join("a0")
    with pytest.raises(MeetingError, match="the books do not balance"):
        place.join("explosive")
    assert place.join("a1").worker_ids == (0, 1)
    place.desk.check()


def test_a_joiner_with_another_secret_is_refused_and_the_next_is_met(
    place: Place, coordinator: Coordinator
) -> None:
    with pytest.raises(MeetingError, match="do not hold the same secret"):
        place.join("a0", WRONG)
    assert coordinator.met == []
    assert place.join("a1").worker_ids == (0, 1)
    place.desk.check()


def test_closing_twice_is_closing(place: Place) -> None:
    place.desk.close()
    place.desk.close()


def test_memory_desk_that_broke_down_meets_nobody_and_says_so() -> None:
    desk = MemoryRendezvous(SECRET)
    desk.start(Coordinator().answer)
    desk.break_down("out of ink")
    with pytest.raises(MeetingError, match="out of ink"):
        desk.check()
    with pytest.raises(MeetingError, match="closed"):
        desk.meet(identity(), SECRET)


# ---- over MPI


def test_joiners_that_come_together_are_all_met(
    mpi_place: MpiPlace, coordinator: Coordinator
) -> None:
    joiners = [start_joiner(mpi_place.directory, f"a{number}") for number in range(3)]
    ids = sorted(worker for joiner in joiners for worker in result(joiner).worker_ids)
    assert ids == list(range(6))


def test_a_secret_that_opens_the_bell_alone_does_not_pass_at_the_desk(
    mpi_place: MpiPlace, coordinator: Coordinator
) -> None:
    before = mpi_place.desk.pid
    mpi_place.bad_joiner("answered", secret=WRONG).wait(30)
    assert mpi_place.join("a0").worker_ids == (0, 1)
    assert coordinator.met == [identity("a0")]
    assert mpi_place.desk.pid == before


@pytest.mark.parametrize("end", ["turn", "connected", "introduced", "answered", "left"])
def test_a_joiner_that_dies_in_the_meeting_takes_nobody_with_it(
    mpi_place: MpiPlace, end: str
) -> None:
    mpi_place.bad_joiner(end).wait(30)
    assert len(mpi_place.join("a1").worker_ids) == 2
    mpi_place.desk.check()


def test_joiners_wait_their_turn_while_another_stands_still_in_the_meeting(
    mpi_place: MpiPlace,
) -> None:
    """They wait at the bell, not in MPI: the desk that gives up is followed by a fresh one."""
    stuck = mpi_place.bad_joiner("connected", "stand still")
    assert stuck.stdout is not None
    try:
        assert stuck.stdout.readline() == "connected\n"
        before = mpi_place.desk.pid
        assert mpi_place.join("a1").worker_ids == (0, 1)
        assert mpi_place.desk.pid != before
    finally:
        stuck.terminate()
        stuck.communicate(timeout=30)


def test_a_killed_desk_is_replaced_and_those_who_wait_at_its_bell_are_met(
    mpi_place: MpiPlace,
) -> None:
    stuck = mpi_place.bad_joiner("turn", "stand still")
    assert stuck.stdout is not None
    try:
        assert stuck.stdout.readline() == "turn\n"
        waiting = start_joiner(mpi_place.directory, "a1")
        before = mpi_place.desk.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert result(waiting).worker_ids == (0, 1)
        mpi_place.desk.check()
        wait_until_gone(before)
    finally:
        stuck.terminate()
        stuck.communicate(timeout=30)


def test_an_idle_desk_uses_no_processor_time(mpi_place: MpiPlace) -> None:
    mpi_place.join("a0")
    assert mpi_place.desk.pid is not None

    def ticks() -> int:
        fields = Path(f"/proc/{mpi_place.desk.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_desk_that_keeps_dying_is_broken(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_PROVIDER", "no-such-provider")
    desk = MpiRendezvous(tmp_path, SECRET)
    with pytest.raises(MeetingError, match="ended 6 times in a row without meeting anybody"):
        desk.start(coordinator.answer)
    with pytest.raises(MeetingError, match=r"front-desk\.log"):
        desk.check()
    desk.close()


def test_the_desk_dies_with_the_coordinator(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", DESK_OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner:
        desk = int(owner.stdout.readline())
        assert is_running(desk)
        owner.kill()
    wait_until_gone(desk)
    port_file(tmp_path).unlink()  # nobody is left to do it


def test_closing_ends_the_desks_process_and_takes_the_port_file_away(
    mpi_place: MpiPlace,
) -> None:
    desk = mpi_place.desk.pid
    assert desk is not None
    assert port_file(mpi_place.directory).stat().st_mode & 0o077 == 0
    mpi_place.desk.close()
    assert not is_running(desk)
    assert not port_file(mpi_place.directory).exists()


# ---- the joiner's deadlines


def test_the_joiner_goes_by_the_netmod_of_the_desk_whatever_the_environment_says(
    tmp_path: Path, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ofi")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")  # it complains on standard output
    desk = MpiRendezvous(tmp_path, SECRET, DeskPlace(netmod="ucx"))
    desk.start(coordinator.answer)
    try:
        place = MeetingPlace.read(tmp_path)
        assert place is not None
        assert place.netmod == "ucx"
        assert result(start_joiner(tmp_path, "a0")).worker_ids == (0, 1)
    finally:
        desk.close()


def test_without_a_desk_the_joiner_gives_up_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for the rendezvous of"):
        meet(tmp_path, identity(), SECRET, 0.2)


def test_at_the_address_of_a_dead_desk_the_joiner_gives_up_at_its_deadline(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    with opened(MpiPlace(tmp_path), coordinator):
        left_over = MeetingPlace.read(tmp_path)
    assert left_over is not None
    left_over.write(tmp_path)
    joiner = start_joiner(tmp_path, "a0", timeout_s=1.0)
    with pytest.raises(DeadlineError, match="the rendezvous of"):
        result(joiner)
    port_file(tmp_path).unlink()


@pytest.mark.parametrize("desk_ends", [True, False])
def test_a_joiner_stuck_in_mpi_ends_with_the_desk_or_at_its_deadline(
    tmp_path: Path, coordinator: Coordinator, desk_ends: bool
) -> None:
    """The bell says "your turn", but at that MPI port there is nobody any more."""
    with opened(MpiPlace(tmp_path), coordinator):
        dead = MeetingPlace.read(tmp_path)
    assert dead is not None
    ended = threading.Event()

    def ring(wire: Wire) -> None:
        wire.send(TURN)
        try:
            wire.receive(0.5 if desk_ends else None)
        except (DeadlineError, ChannelClosed):
            ended.set()

    bell = WireServer("127.0.0.1", SECRET, ring)
    try:
        dead.model_copy(update={"bell_port": bell.address[1]}).write(tmp_path)
        joiner = start_joiner(tmp_path, "a0", timeout_s=30.0 if desk_ends else 2.0)
        assert joiner.wait(20) == (EXIT_DESK_LOST if desk_ends else EXIT_STUCK)
        assert ended.wait(5)
    finally:
        bell.close()
        port_file(tmp_path).unlink()
    joiner.communicate(timeout=10)
