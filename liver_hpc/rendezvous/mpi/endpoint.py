"""One end of a meeting: `python -m liver_hpc.rendezvous.mpi.endpoint accept|connect FD`.

Started as an `MpiProcess`, whose bytes come and go over the inherited FD. What it hears first is by
what MPI goes, as JSON. To accept, it then says its port name and of which release its MPI library
is; and for each turn:

    parent   -> acceptor   a joiner is about to connect
    acceptor -> parent     the joiner's introduction
    parent   -> acceptor   the reception for the joiner
    acceptor -> parent     disconnected; but MPI goes on to answer the joiner until
    parent   -> acceptor   the joiner is through with MPI

To connect, it lives for one meeting:

    joiner -> parent       it is in MPI
    parent -> joiner       the acceptor's port name, and its release; the introduction
    joiner -> parent       the reception
    joiner -> parent       it is through with MPI

The last word of one that fails is the error, behind FAILED.

It imports little: nobody is to wait for that. It knows no secret and has no deadlines: a call of
MPI's may hang or abort the process, and the parent ends it. A waiting MPI_Comm_accept burns a whole
core: so it is only entered when a joiner is about to connect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from multiprocessing.connection import Connection

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.mpi.pmi import FAILED


def main() -> None:
    """Runs until its part is done, the parent has gone or MPI has failed; then exits at once: MPI
    may be broken."""
    role, parent = sys.argv[1], Connection(int(sys.argv[2]))
    logging.basicConfig(format=f"%(asctime)s %(levelname)s [MPI, {role}] %(message)s")
    try:
        os.environ.update(json.loads(parent.recv_bytes()))
        from liver_hpc.rendezvous.mpi import calls

        (calls.accept if role == "accept" else calls.connect)(parent)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except MeetingError as error:
        logging.error("%s", error)
        with contextlib.suppress(OSError):
            parent.send_bytes(FAILED + str(error).encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
