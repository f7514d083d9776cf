"""The joiner: `python -m liver_hpc.rendezvous.mpi.joiner RUN_DIRECTORY TIMEOUT_S IDENTITY`.

It lives for one meeting: enters MPI, meets the rendezvous, leaves MPI, prints the Answer as a
line of JSON on standard output and ends. Only its stderr says why a meeting failed.

Exit codes: 0 after a meeting, EXIT_NOT_MET, and those of `mpi_calls`; EXIT_FAILED otherwise.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError, MeetingError
from liver_hpc.host.lifeline import on_parent_exit, quiet_thread
from liver_hpc.rendezvous.base import Answer, Identity, accepted, converse, joiner_dialogue
from liver_hpc.rendezvous.mpi import calls
from liver_hpc.rendezvous.mpi.calls import (
    EXIT_DESK_LOST,
    TURN,
    MeetingPlace,
    MpiPeer,
    Watchdog,
    end_process,
)
from liver_hpc.rendezvous.wire import ChannelClosed, ChannelRefused, Wire, dial
from liver_hpc.run.secret import read_secret

EXIT_FAILED = 1
"""The joiner itself failed."""
EXIT_NOT_MET = 88
"""The rendezvous refused the joiner, or did not answer in time."""

_RETRY_INTERVAL_S = 0.05
_STUCK_MARGIN_S = 1.0

log = logging.getLogger(__name__)


def meet(run_directory: Path, identity: Identity, secret: bytes, timeout_s: float) -> Answer:
    """Meets the rendezvous of a run over MPI and leaves MPI again; once per process.

    This process must be the only one of an MPI world that a process manager has started.

    Raises MeetingError when refused, or when the desk does not hold the same secret;
    DeadlineError after `timeout_s`. A call of MPI's may not come back at all: then the process
    ends with EXIT_STUCK soon after, or with EXIT_DESK_LOST as soon as the desk has ended.
    """
    waits_for = f"the rendezvous of {run_directory}"
    deadline = Deadline.after(SystemClock(), timeout_s, waits_for)
    place = _meeting_place(run_directory, deadline)
    watchdog = Watchdog(f"agent {identity.agent}")
    with watchdog.limit(deadline.remaining_s() + _STUCK_MARGIN_S, waits_for):
        calls.start_mpi(place.bell_host, place.interface, place.netmod)
        wire, place = _wait_for_turn(run_directory, secret, deadline)
        finished = threading.Event()
        quiet_thread(lambda: _watch_desk(wire, finished, identity.agent), "desk-watch")
        try:
            communicator = calls.connect(place.mpi_port, deadline.remaining_s())
            line = MpiPeer(communicator, deadline, threading.Event())
            verdict = converse(joiner_dialogue(identity, secret), line.send, line.receive)
            line.leave()
            calls.leave_mpi()
        finally:
            finished.set()
            wire.close()
    return accepted(verdict, identity)


def _meeting_place(run_directory: Path, deadline: Deadline) -> MeetingPlace:
    found: list[MeetingPlace] = []

    def look() -> bool:
        place = MeetingPlace.read(run_directory)
        if place is not None:
            found.append(place)
        return place is not None

    poll_until(look, deadline, _RETRY_INTERVAL_S)
    return found[0]


def _wait_for_turn(
    run_directory: Path, secret: bytes, deadline: Deadline
) -> tuple[Wire, MeetingPlace]:
    """Rings the bell until it says that it is this joiner's turn.

    A desk that has ended meanwhile is followed by another one, at another place.
    """
    pause = threading.Event()
    while True:
        place = _meeting_place(run_directory, deadline)
        try:
            wire = dial(
                (place.bell_host, place.bell_port),
                secret,
                max(deadline.remaining_s(), 0.001),
                deadline.waits_for,
            )
            if wire.receive(deadline.remaining_s()) == TURN:
                return wire, place
            raise MeetingError(f"{deadline.waits_for}: its bell says something else")
        except ChannelRefused as error:
            raise MeetingError(str(error)) from error
        except ChannelClosed:
            deadline.check()
            pause.wait(_RETRY_INTERVAL_S)


def _watch_desk(wire: Wire, finished: threading.Event, agent: str) -> None:
    """Ends this process when the desk ends first: MPI would never come back from it."""
    try:
        wire.receive()
    except ChannelClosed as error:
        if not finished.is_set():
            end_process(f"[agent {agent}] {error}", EXIT_DESK_LOST)


def joiner_command(run_directory: Path, identity: Identity, timeout_s: float) -> list[str]:
    """The command line of a joiner, to be run where a process manager can be reached."""
    module = [sys.executable, "-P", "-m", "liver_hpc.rendezvous.mpi.joiner"]
    return [*module, str(run_directory), str(timeout_s), identity.model_dump_json()]


def main() -> NoReturn:
    """Meets and exits at once: an MPI that a meeting has left broken must not hold it."""
    run_directory, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    identity = Identity.model_validate_json(sys.argv[3])
    on_parent_exit(lambda: os.kill(os.getpid(), signal.SIGTERM))
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
