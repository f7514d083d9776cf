"""The rendezvous's process: `python -m liver_hpc.rendezvous.mpi.acceptor PARENT RUN_DIRECTORY`.

Started by `MpiRendezvous`. A joiner first rings the bell (a TCP connection, authenticated with the
run's secret) and gets its turn there; only then does it connect over MPI, and the desk accept.
A waiting MPI_Comm_accept burns a whole core: so the desk sleeps until the bell rings. The
joiner's end of the bell stays open until it is through with MPI: it tells the desk for how long
to make progress for it, and each side when the other has died.

After a meeting that broke off, the process ends with EXIT_RENEW and a fresh one takes its place:
nothing that a dead joiner left in MPI can reach the next one.

Standard input, lines of JSON: first the settings, then one verdict per question.
Standard output, lines of JSON: {"event": "open" | "ask" | "met" | "refused", ...}.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.host.lifeline import die_with_parent, quiet_thread
from liver_hpc.rendezvous.base import (
    Answer,
    Identity,
    Refusal,
    Verdict,
    converse,
    desk_dialogue,
)
from liver_hpc.rendezvous.mpi.calls import (
    TURN,
    MeetingPlace,
    MpiError,
    MpiPeer,
    Watchdog,
    accept,
    end_process,
    make_progress,
    open_port,
    start_mpi,
)
from liver_hpc.rendezvous.wire import ChannelClosed, Wire, WireServer

EXIT_RENEW = 83
"""Exit code after a meeting that broke off: nothing is wrong with the desk, start a fresh one."""

_START_S = 20.0
_STUCK_MARGIN_S = 2.0
_PROGRESS_INTERVAL_S = 0.001


@dataclass
class Turn:
    """One joiner at the bell; `gone` once it has left."""

    wire: Wire
    gone: threading.Event = field(default_factory=threading.Event)


class Desk:
    """Meets one joiner after the other."""

    def __init__(self, run_directory: Path, settings: dict[str, Any]) -> None:
        self._secret = bytes.fromhex(settings["secret"])
        self._turn_s = float(settings["turn_s"])
        self._watchdog = Watchdog("rendezvous")
        self._clock = SystemClock()
        self._asked = 0
        self._turns: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[str] = queue.SimpleQueue()
        quiet_thread(self._read_verdicts, "verdicts")
        with self._watchdog.limit(_START_S, "MPI to start"):
            netmod = start_mpi(settings["host"], settings["interface"], settings["netmod"])
            self._mpi_port = open_port()
        bell = WireServer(settings["host"], self._secret, self._ring)
        MeetingPlace(
            mpi_port=self._mpi_port,
            bell_host=bell.address[0],
            bell_port=bell.address[1],
            interface=settings["interface"],
            netmod=netmod,
        ).write(run_directory)
        _say("open")

    def serve(self) -> None:
        """Until the process is ended from outside or a meeting breaks off."""
        while True:
            turn = self._turns.get()
            if not turn.gone.is_set():
                self._meet(turn)

    def _ring(self, wire: Wire) -> None:
        """Runs in the bell's thread of one joiner, until that joiner leaves."""
        turn = Turn(wire)
        self._turns.put(turn)
        try:
            wire.receive()
        except ChannelClosed:
            return
        finally:
            turn.gone.set()

    def _meet(self, turn: Turn) -> None:
        peer = turn.wire.peer
        try:
            turn.wire.send(TURN)
        except ChannelClosed:
            return
        deadline = Deadline.after(self._clock, self._turn_s, f"the joiner from {peer}")
        limit_s = self._turn_s + _STUCK_MARGIN_S
        with self._watchdog.limit(limit_s, f"MPI with the joiner from {peer}"):
            communicator = accept(self._mpi_port, deadline, turn.gone)
            line = MpiPeer(communicator, deadline, turn.gone)
            try:
                identity = converse(desk_dialogue(self._ask, self._secret), line.send, line.receive)
            except MpiError:
                raise
            except MeetingError as error:  # said, and heard, in good order
                _say("refused", reason=str(error))
            else:
                _say("met", agent=identity.agent)
            line.leave()
            while not turn.gone.wait(_PROGRESS_INTERVAL_S):
                make_progress()
                deadline.check()

    def _ask(self, identity: Identity) -> Answer | Refusal:
        """Has the coordinator decide."""
        self._asked += 1
        _say("ask", number=self._asked, identity=identity.model_dump())
        deadline = Deadline.after(self._clock, self._turn_s, "the coordinator's answer")
        while True:
            try:
                told = json.loads(self._verdicts.get(timeout=deadline.remaining_s()))
            except queue.Empty:
                raise deadline.error() from None
            # A late answer belongs to a joiner that has been refused meanwhile.
            if told["number"] == self._asked:
                return Verdict.model_validate(told["verdict"]).root

    def _read_verdicts(self) -> None:
        for line in sys.stdin:
            self._verdicts.put(line)
        end_process("[rendezvous] the coordinator has gone", 0)


def _say(event: str, **details: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parent, run_directory = int(sys.argv[1]), Path(sys.argv[2])
    # Not SIGKILL: that one could come between MPI's making and unlinking shared memory.
    die_with_parent(parent, signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [rendezvous] %(message)s")
    try:
        Desk(run_directory, json.loads(sys.stdin.readline())).serve()
    except LiverError as error:
        end_process(f"[rendezvous] a meeting broke off: {error}", EXIT_RENEW)
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
