"""The rendezvous over MPI, on the coordinator's side (the joiner's is `joiner.py`).

Joiners queue at a TCP port, authenticated with the run's secret, until it is their turn; only then
do they connect over MPI. A joiner's place in the queue stays open until it is through with MPI: so
each side knows when the other has died.

MPI lives in a process of its own (`process.py`): one that hangs or aborts takes nothing with it.
After a meeting that broke off a fresh one takes its place: nothing that a dead joiner left in MPI
can reach the next joiner. After `MOST_MEETINGS`, too, MPICH has room for no more.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError, MeetingError
from liver_hpc.host.files import write_whole
from liver_hpc.protocol.messages import YourTurn
from liver_hpc.rendezvous.base import Decide, Identity, Rendezvous, reception
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.mpi.network import MpiNetwork, RendezvousPlace, place_file
from liver_hpc.rendezvous.mpi.process import ENDPOINT, MpiEnded, MpiProcess, is_gone
from liver_hpc.rendezvous.server import ControlServer

TURN_S = 10.0
"""The longest that one joiner may hold the acceptor, the coordinator's answer included."""
_OPEN_S = 30.0
_CLOSE_S = 10.0
MOST_MEETINGS = 1000
"""Of one acceptor. MPICH has 1,024 places for worlds, one of them its own, and gives none back: it
aborts for want of another one."""
_MAX_FAILURES = 5
_AGAIN_S = 30.0
"""After so long a rendezvous that is broken tries once more to open an acceptor."""
_RETRY_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Acceptor(MpiProcess):
    """A running acceptor, the port name at which it accepts, and the release of its MPI library.

    Raises LiverError when it cannot be started, MeetingError when it does not open its port.
    """

    def __init__(self, network: MpiNetwork, log: Path) -> None:
        super().__init__("the acceptor", [*ENDPOINT, "accept"], log)
        try:
            self.enter(network)
            opens = Deadline.after(SystemClock(), _OPEN_S, "the acceptor to open its port")
            self.port_name = self.hear(opens).decode()
            self.release = self.hear(opens).decode()
        except (MpiEnded, DeadlineError) as error:
            self.close()
            raise MeetingError(f"{error}; see {log}") from error
        self.num_met = 0

    def meet(self, joiner: Channel, decide: Decide) -> Identity | None:
        """The turn of the joiner at the other end of the channel; who it is, where it proved it.

        Raises MpiEnded, ChannelClosed when the joiner has ended, and DeadlineError: then it is of
        no more use.
        """
        deadline = Deadline.after(SystemClock(), TURN_S, f"the joiner from {joiner.peer}")
        joiner.send(YourTurn(port_name=self.port_name, mpi=self.release))
        self.say(b"comes")
        said, identity = reception(joiner.key, self.hear(deadline, joiner), decide)
        self.say(said)
        self.hear(deadline)
        if not is_gone(joiner, deadline.remaining_s()):
            raise deadline.error()
        self.say(b"through")
        self.num_met += 1
        return identity


class MpiRendezvous(Rendezvous):
    """Keeps a queue and an acceptor, whose log is logs/rendezvous.log.

    `network` is the address at which joiners queue, and what MPI goes by.
    """

    def __init__(self, run_directory: Path, secret: bytes, network: MpiNetwork) -> None:
        self._place_file = place_file(run_directory)
        self._log_file = run_directory / "logs" / "rendezvous.log"
        self._secret = secret
        self._network = network
        self._turn = threading.RLock()
        """Whoever holds it has the acceptor."""
        self._acceptor: Acceptor | None = None
        self._queue: ControlServer | None = None
        self._closing = threading.Event()
        self._failures: list[str] = []
        self._broken_until: Deadline | None = None

    def start(self, answer: Decide) -> None:
        self._network = self._network.decided(os.environ)
        if self._ready() is None:  # whoever comes later has it try again
            self._broken_until = Deadline.after(SystemClock(), _AGAIN_S, "another attempt")
        host = self._network.host
        try:
            self._queue = ControlServer(host, self._secret, lambda one: self._line_up(one, answer))
        except OSError as error:
            self.close()
            raise MeetingError(f"joiners cannot queue at {host}: {error.strerror}") from error
        place = RendezvousPlace(network=self._network, port=self._queue.address[1])
        write_whole(self._place_file, place.model_dump_json(), mode=0o600)

    def check(self) -> None:
        failures = self._failures
        if failures and self._is_broken():
            raise MeetingError(
                "the rendezvous is broken; acceptors that did not open in a row: "
                f"{len(failures)}; the last: {failures[-1]}"
            )

    def _is_broken(self) -> bool:
        """For a while: what has kept acceptors from opening may pass."""
        until = self._broken_until
        return until is not None and not until.expired()

    def close(self) -> None:
        self._closing.set()
        if self._acceptor is not None:
            self._acceptor.send_signal(signal.SIGKILL)  # ends a turn that is under way
        if self._queue is not None:
            self._queue.close()
        if self._turn.acquire(timeout=_CLOSE_S):
            self._discard()
            self._turn.release()
        self._place_file.unlink(missing_ok=True)

    def _line_up(self, joiner: Channel, answer: Decide) -> None:
        """Runs in the queue's thread of one joiner, which leaves the queue at its end."""
        with self._turn:
            if not is_gone(joiner) and (acceptor := self._ready()) is not None:
                is_of_use = False
                try:
                    met = acceptor.meet(joiner, answer)
                    is_of_use = acceptor.num_met < MOST_MEETINGS
                    if met is not None:
                        _log.info("agent %s has met the coordinator", met.agent)
                except (MpiEnded, ChannelClosed, DeadlineError) as error:
                    _log.warning("a meeting broke off: %s", error)
                finally:
                    if not is_of_use:
                        self._discard()
                joiner.close("the meeting is over")
            self._ready()  # at once, for the next joiner

    def _ready(self) -> Acceptor | None:
        """An acceptor that runs; None where none can be had."""
        if self._acceptor is not None and self._acceptor.exit_code() is not None:
            self._discard()
        if self._acceptor is None and not self._is_broken() and not self._closing.is_set():
            try:
                self._acceptor = Acceptor(self._network, self._log_file)
                self._failures, self._broken_until = [], None
            except LiverError as error:
                _log.warning("%s", error)
                self._failures = [*self._failures[-_MAX_FAILURES:], str(error)]
                if len(self._failures) > _MAX_FAILURES:
                    self._broken_until = Deadline.after(SystemClock(), _AGAIN_S, "another attempt")
                self._closing.wait(_RETRY_PAUSE_S * len(self._failures))
        return self._acceptor

    def _discard(self) -> None:
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
