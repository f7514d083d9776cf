"""The joiner: `python -m liver_hpc.rendezvous.mpi.joiner RUN_DIRECTORY TIMEOUT_S IDENTITY`.

It lives for one meeting: enters MPI, meets the rendezvous, leaves MPI, prints the Answer as a
line of JSON on standard output and ends. Only its stderr says why a meeting failed.

Exit codes: 0 after a meeting, else those named below.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, MeetingError, ProtocolError
from liver_hpc.host.process import quiet_thread
from liver_hpc.protocol.messages import YourTurn
from liver_hpc.rendezvous.base import Answer, Identity, accepted, introduction, verdict_in
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ChannelRefused, connect
from liver_hpc.rendezvous.mpi.network import RendezvousPlace
from liver_hpc.run.secret import read_secret

EXIT_FAILED = 1
"""The joiner itself failed."""
EXIT_STUCK = 81
"""A call of MPI's did not come back by the deadline."""
EXIT_RENDEZVOUS_LOST = 82
"""The rendezvous ended in the middle of the meeting."""
EXIT_NOT_MET = 88
"""The rendezvous refused the joiner, or did not answer in time."""

_RETRY_INTERVAL_S = 0.05
_STUCK_MARGIN_S = 1.0

log = logging.getLogger(__name__)


def meet(run_directory: Path, identity: Identity, secret: bytes, timeout_s: float) -> Answer:
    """Meets the rendezvous of a run over MPI and leaves MPI again; once per process.

    This process must be the only one of an MPI world, as an `MpiProcess` is.

    Raises MeetingError when refused, or when the rendezvous does not hold the same secret;
    DeadlineError after `timeout_s`. A call of MPI's may not come back at all: then the process
    ends with EXIT_STUCK soon after, or with EXIT_RENDEZVOUS_LOST as soon as that has ended.
    """
    name, waits_for = f"agent {identity.agent}", f"the rendezvous of {run_directory}"
    deadline = Deadline.after(SystemClock(), timeout_s, waits_for)
    left = threading.Event()
    place = _place(run_directory, deadline)
    os.environ.update(place.network.variables(os.environ))
    quiet_thread(lambda: _end_when_stuck(left, deadline, name), "watchdog")
    from liver_hpc.rendezvous.mpi.calls import MPI, connect_to, mpi_errors, receive, send, start_mpi

    with mpi_errors():
        start_mpi()
        queue, port_name = _wait_for_turn(run_directory, secret, deadline)
        quiet_thread(lambda: _end_when_lost(left, queue, name), "rendezvous-watch")
        peer = connect_to(port_name, deadline.remaining_s())
        send(peer, introduction(queue.key, identity))
        verdict = verdict_in(queue.key, receive(peer))
        peer.Disconnect()
        MPI.Finalize()
    left.set()
    queue.close()
    return accepted(verdict, identity)


def _place(run_directory: Path, deadline: Deadline) -> RendezvousPlace:
    pause = threading.Event()
    while (place := RendezvousPlace.read(run_directory)) is None:
        deadline.check()
        pause.wait(_RETRY_INTERVAL_S)
    return place


def _wait_for_turn(run_directory: Path, secret: bytes, deadline: Deadline) -> tuple[Channel, str]:
    """Queues until it is this joiner's turn; the place in the queue, and MPI's port name.

    A rendezvous that has ended meanwhile may be followed by another one, at another place.
    """
    pause = threading.Event()
    while True:
        place = _place(run_directory, deadline)
        address = (place.network.host, place.port)
        try:
            limit_s = max(deadline.remaining_s(), 0.001)
            queue = connect(address, secret, limit_s, deadline.waits_for)
            told = queue.receive(deadline.remaining_s())
        except ChannelRefused as error:
            raise MeetingError(str(error)) from error
        except ChannelClosed:
            deadline.check()
            pause.wait(_RETRY_INTERVAL_S)
        else:
            if not isinstance(told, YourTurn):
                raise ProtocolError(f"{deadline.waits_for}: wanted its turn, got {told.type}")
            return queue, told.port_name


def _end_when_stuck(left: threading.Event, deadline: Deadline, name: str) -> None:
    if not left.wait(deadline.remaining_s() + _STUCK_MARGIN_S):
        _end_process(f"[{name}] stuck in MPI: {deadline.error()}", EXIT_STUCK)


def _end_when_lost(left: threading.Event, queue: Channel, name: str) -> None:
    """MPI would never come back from a rendezvous that has ended."""
    try:
        queue.receive()
    except ChannelClosed as error:
        if not left.is_set():
            _end_process(f"[{name}] {error}", EXIT_RENDEZVOUS_LOST)


def _end_process(message: str, code: int) -> NoReturn:
    """Says why on standard error and ends the process at once, whatever its threads do."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{message}\n".encode())
    os._exit(code)


def main() -> NoReturn:
    """Meets and exits at once: an MPI that a meeting has left broken must not hold it."""
    run_directory, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    identity = Identity.model_validate_json(sys.argv[3])
    # Whatever a library prints must not pass for the answer.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [agent {identity.agent}] %(message)s",
    )
    code = 0
    try:
        secret = read_secret(run_directory / "secret")
        answer = meet(run_directory, identity, secret, timeout_s)
        os.write(output, answer.model_dump_json().encode() + b"\n")
    except (MeetingError, DeadlineError) as error:
        log.error("%s", error)
        code = EXIT_NOT_MET
    except Exception:
        log.exception("the joiner failed")
        code = EXIT_FAILED
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
