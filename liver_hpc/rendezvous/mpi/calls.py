"""What both ends of a meeting do in MPI. Importing this module loads MPI into the process.

MPI's waits spin, and cannot be interrupted from within: who calls has somebody else end the process
when a call does not come back. Only upper-case calls on bytes: the lower-case ones pickle.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.mpi.pmi import MAX_MESSAGE_BYTES

try:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py itself, or the library that it loads
    raise MeetingError(f"MPI cannot be loaded ({error}); pip install mpi4py mpich") from error

_TAG = 1
_UNABLE = "Open MPI"
_PROGRESS_INTERVAL_S = 0.001


@contextlib.contextmanager
def _mpi_errors() -> Iterator[None]:
    """An error of MPI's is a MeetingError, after which this process must make no more MPI calls."""
    try:
        yield
    except MPI.Exception as error:
        raise MeetingError("; ".join(error.Get_error_string().splitlines())) from error


@_mpi_errors()
def accept(parent: Connection) -> None:
    """Opens a port and meets joiners. Raises EOFError once the parent has gone, MeetingError."""
    start_mpi()
    port_name = MPI.Open_port()
    parent.send_bytes(port_name.encode())
    parent.send_bytes(_release().encode())
    while True:
        parent.recv_bytes()
        joiner = MPI.COMM_SELF.Accept(port_name)
        parent.send_bytes(receive(joiner))
        send(joiner, parent.recv_bytes())
        joiner.Disconnect()
        parent.send_bytes(b"left")
        while not parent.poll(_PROGRESS_INTERVAL_S):
            MPI.COMM_SELF.Iprobe()
        parent.recv_bytes()


@_mpi_errors()
def connect(parent: Connection) -> None:
    """Meets the acceptor and leaves MPI again. Raises what `accept` does, MeetingError before it
    meets one whose MPI is of another release."""
    start_mpi()
    parent.send_bytes(b"in MPI")
    port_name, theirs = (parent.recv_bytes().decode() for _ in range(2))
    if theirs != (ours := _release()):
        raise MeetingError(
            f"the MPI library here is {ours!r}, the coordinator's {theirs!r}: they may not "
            "understand each other; install the same release of mpich on the coordinator's host, "
            "on nodes and in images"
        )
    acceptor = MPI.COMM_SELF.Connect(port_name)
    send(acceptor, parent.recv_bytes())
    parent.send_bytes(receive(acceptor))
    acceptor.Disconnect()
    MPI.Finalize()
    parent.send_bytes(b"left")


def start_mpi() -> None:
    """Initialises MPI in this process, and takes the name of MPICH's segment away.

    Nobody else on this host will attach to that, the world being one process; so the kernel frees
    it however this process ends. SIGTERM and SIGINT wait meanwhile.

    Raises MeetingError for a library that cannot connect worlds that were launched apart.
    """
    library, version = MPI.get_vendor()
    if library == _UNABLE:
        raise MeetingError(
            f"mpi4py has loaded {library} {'.'.join(map(str, version))}, which cannot connect "
            "processes that were launched apart; wanted MPICH: pip install mpich, or name its "
            "libmpi.so in MPI4PY_LIBMPI"
        )
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        for name in set(re.findall(r"(/dev/shm/mpich_shm_\w+)$", maps, re.MULTILINE)):
            Path(name).unlink(missing_ok=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _release() -> str:
    """Of the MPI library, such as "MPICH Version: 5.0.2"."""
    return " ".join(MPI.Get_library_version().splitlines()[0].split())


def send(peer: MPI.Intercomm, data: bytes) -> None:
    """Sends one message to the one process at the other end; so does `receive`."""
    peer.Send([data, MPI.BYTE], dest=0, tag=_TAG)


def receive(peer: MPI.Intercomm) -> bytes:
    """The next message. Raises MeetingError for one of over MAX_MESSAGE_BYTES."""
    status = MPI.Status()
    peer.Probe(source=0, tag=_TAG, status=status)
    num_bytes = status.Get_count(MPI.BYTE)
    if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
        raise MeetingError(f"message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES}")
    data = bytearray(num_bytes)
    peer.Recv([data, MPI.BYTE], source=0, tag=_TAG)
    return bytes(data)
