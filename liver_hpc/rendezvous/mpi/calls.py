"""The few MPI calls that a meeting needs. Importing this module loads MPI into the process.

MPI's waits spin, and cannot be interrupted from within: who calls has somebody else end the process
when a call does not come back. Only upper-case calls on bytes: the lower-case ones pickle.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.base import MAX_MESSAGE_BYTES

try:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py itself, or the library that it loads
    raise MeetingError(f"MPI cannot be loaded ({error}); pip install mpi4py mpich") from error

_TAG = 1


class MpiError(MeetingError):
    """MPI failed: this process must make no more MPI calls. Every function here may raise it."""


@contextlib.contextmanager
def _mpi_errors(call: str) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise MpiError(f"{call}: {error.Get_error_string().splitlines()[0]}") from error


def start_mpi() -> None:
    """Initialises MPI in this process.

    SIGTERM and SIGINT wait meanwhile, so that they find nothing of MPI's in /dev/shm.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with _mpi_errors("MPI_Init_thread"):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _unlink_shared_memory()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _unlink_shared_memory() -> None:
    """Takes the name of MPICH's segment away, as MPICH itself would at Finalize.

    Nobody else on this host will attach to it, the world being one process; so the kernel frees
    it however this process ends.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for name in set(re.findall(r"(/dev/shm/mpich_shm_\w+)$", maps, re.MULTILINE)):
        Path(name).unlink(missing_ok=True)


def open_port() -> str:
    """The name of a new port, to which joiners can connect."""
    with _mpi_errors("MPI_Open_port"):
        return MPI.Open_port()


def make_progress() -> None:
    """Lets MPI answer a peer that still needs it."""
    with _mpi_errors("MPI_Iprobe"):
        MPI.COMM_SELF.Iprobe()


def leave_mpi() -> None:
    """Finalizes MPI; the process goes on without it."""
    with _mpi_errors("MPI_Finalize"):
        MPI.Finalize()


class MpiPeer:
    """The one process at the other end of an intercommunicator."""

    def __init__(self, communicator: MPI.Intercomm) -> None:
        self._communicator = communicator

    @classmethod
    def accepted(cls, port_name: str) -> MpiPeer:
        """The next one that connects to a port of this process; waits for it without end."""
        with _mpi_errors("MPI_Comm_accept"):
            return cls(MPI.COMM_SELF.Accept(port_name))

    @classmethod
    def connected(cls, port_name: str, limit_s: float) -> MpiPeer:
        """The one that accepts there. Where nobody does any more, it may hang beyond the limit."""
        info = MPI.Info.Create({"timeout": str(max(1, round(limit_s)))})  # MPICH's own key
        with _mpi_errors("MPI_Comm_connect"):
            return cls(MPI.COMM_SELF.Connect(port_name, info))

    def send(self, data: bytes) -> None:
        """Sends one message."""
        with _mpi_errors("MPI_Send"):
            self._communicator.Send([data, MPI.BYTE], dest=0, tag=_TAG)

    def receive(self) -> bytes:
        """The next message."""
        with _mpi_errors("MPI_Recv"):
            status = MPI.Status()
            self._communicator.Probe(source=0, tag=_TAG, status=status)
            num_bytes = status.Get_count(MPI.BYTE)
            if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
                raise MpiError(f"message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES}")
            data = bytearray(num_bytes)
            self._communicator.Recv([data, MPI.BYTE], source=0, tag=_TAG)
            return bytes(data)

    def leave(self) -> None:
        """Disconnects from the peer."""
        with _mpi_errors("MPI_Comm_disconnect"):
            self._communicator.Disconnect()
