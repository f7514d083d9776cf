"""The MPI process of the rendezvous: `python -m liver_hpc.rendezvous.mpi.acceptor FD`.

Started by `MpiRendezvous`, with which it talks over the inherited FD (a multiprocessing.Connection
that carries bytes): first it says its port name. Then, for each turn:

    parent   -> acceptor   a joiner is about to connect
    acceptor -> parent     the joiner's introduction
    parent   -> acceptor   the reception for the joiner
    acceptor -> parent     disconnected; but MPI goes on to answer the joiner until
    parent   -> acceptor   the joiner is through with MPI

It knows no secret and has no deadlines: a call of MPI's may hang or abort the process, and the
parent replaces it. A waiting MPI_Comm_accept burns a whole core: so it is only entered when a
joiner is about to connect.
"""

from __future__ import annotations

import logging
import os
import sys
from multiprocessing.connection import Connection

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.mpi.calls import MPI, mpi_errors, receive, send, start_mpi

_PROGRESS_INTERVAL_S = 0.001

_log = logging.getLogger(__name__)


def meet(parent: Connection, port_name: str) -> None:
    """One turn. Raises EOFError once the parent has gone."""
    parent.recv_bytes()
    joiner = MPI.COMM_SELF.Accept(port_name)
    parent.send_bytes(receive(joiner))
    send(joiner, parent.recv_bytes())
    joiner.Disconnect()
    parent.send_bytes(b"left")
    while not parent.poll(_PROGRESS_INTERVAL_S):
        MPI.COMM_SELF.Iprobe()
    parent.recv_bytes()


def main() -> None:
    """Runs until the parent has gone or MPI has failed; then exits at once: MPI may be broken."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [acceptor] %(message)s")
    parent: Connection = Connection(int(sys.argv[1]))
    try:
        with mpi_errors():
            start_mpi()
            port_name = MPI.Open_port()
            parent.send_bytes(port_name.encode())
            while True:
                meet(parent, port_name)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except MeetingError as error:
        _log.error("%s", error)
        os._exit(1)


if __name__ == "__main__":
    main()
