"""The joiner's side of a meeting (the coordinator's is `service.py`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, MeetingError, ProtocolError
from liver_hpc.protocol.messages import YourTurn
from liver_hpc.rendezvous.base import Answer, Identity, answer_in, introduction
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ChannelRefused, connect
from liver_hpc.rendezvous.mpi.network import RendezvousPlace
from liver_hpc.rendezvous.mpi.process import ENDPOINT, MpiProcess

_RETRY_INTERVAL_S = 0.05


class StuckInMpi(MeetingError):
    """A call of MPI's did not come back by the deadline."""


class RendezvousLost(MeetingError):
    """The rendezvous ended in the middle of the meeting."""


def joiner_process() -> MpiProcess:
    """An MPI process for one meeting, which will end with this process. Raises LiverError."""
    return MpiProcess("the joiner", [*ENDPOINT, "connect"])


def meet(
    process: MpiProcess,
    run_directory: Path,
    identity: Identity,
    secret: bytes,
    turn_s: float,
    meet_s: float,
) -> Answer:
    """Meets the rendezvous of a run by a fresh `joiner_process`, of which nothing is left then.

    Raises MeetingError when refused, when the rendezvous does not hold the same secret, where none
    is found for `meet_s`, the process is not in MPI after `turn_s`, its turn has not come after as
    long again, or then the meeting takes longer than `meet_s`: StuckInMpi when that came in the
    middle.
    """

    def within(limit_s: float) -> Deadline:
        return Deadline.after(SystemClock(), limit_s, f"the rendezvous of {run_directory}")

    try:
        process.enter(_place(run_directory, within(meet_s)).network)
        # Its turn is short, and MPI may have to come over a slow file system.
        process.hear(Deadline.after(SystemClock(), turn_s, f"{process.name} to enter MPI"))
        found, turn = within(meet_s), within(turn_s)
        queue, told = _wait_for_turn(process, run_directory, secret, found, turn)
        with contextlib.closing(queue):
            said = introduction(queue.key, identity)
            says = [told.port_name.encode(), told.mpi.encode(), said]
            heard = _exchange(process, queue, says, within(meet_s))
        return answer_in(queue.key, heard, identity)
    except DeadlineError as error:
        raise MeetingError(str(error)) from error
    finally:
        process.close()


def _place(run_directory: Path, deadline: Deadline) -> RendezvousPlace:
    pause = threading.Event()
    while (place := RendezvousPlace.read(run_directory)) is None:
        deadline.check()
        pause.wait(_RETRY_INTERVAL_S)
    return place


def _wait_for_turn(
    process: MpiProcess, run_directory: Path, secret: bytes, found: Deadline, turn: Deadline
) -> tuple[Channel, YourTurn]:
    """Queues until it is this joiner's turn; the place in the queue, and how to meet.

    A rendezvous that has ended meanwhile may be followed by another one, at another place.
    """
    pause, deadline = threading.Event(), found
    while True:
        place = _place(run_directory, deadline)
        address = (place.network.host, place.port)
        try:
            limit_s = max(deadline.remaining_s(), 0.001)
            queue = connect(address, secret, limit_s, deadline.waits_for)
            deadline = turn
            with contextlib.ExitStack() as giving_up:
                giving_up.callback(queue.close)  # else its turn would come, and hold up others
                process.await_peer(queue, deadline)
                told = queue.receive(deadline.remaining_s())
                if not isinstance(told, YourTurn):
                    raise ProtocolError(f"{deadline.waits_for}: wanted its turn, got {told.type}")
                giving_up.pop_all()
                return queue, told
        except ChannelRefused as error:
            raise MeetingError(str(error)) from error
        except ChannelClosed:
            deadline.check()
            pause.wait(_RETRY_INTERVAL_S)


def _exchange(
    process: MpiProcess, queue: Channel, says: Sequence[bytes], deadline: Deadline
) -> bytes:
    """What the acceptor said, once the process has left MPI."""
    try:
        for said in says:
            process.say(said)
        heard = process.hear(deadline, queue)
        process.hear(deadline, queue)
        return heard
    except DeadlineError as error:
        raise StuckInMpi(f"stuck in MPI: {error}") from error
    except ChannelClosed as error:
        raise RendezvousLost(str(error)) from error
