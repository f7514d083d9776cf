"""The few MPI calls that a meeting needs, each under a deadline; imports mpi4py when first used.

MPI's own waits cannot be interrupted from within: a call that does not come back ends the
process (`Watchdog`). Only upper-case calls on bytes: the lower-case ones pickle.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from liver_hpc.clock import Deadline
from liver_hpc.errors import MeetingError
from liver_hpc.host.files import write_whole
from liver_hpc.host.interfaces import interface_towards, is_loopback
from liver_hpc.host.lifeline import quiet_thread
from liver_hpc.rendezvous.base import MAX_DIALOGUE_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_STUCK = 81
"""Exit code of a process whose MPI call did not come back by its deadline."""
EXIT_DESK_LOST = 82
"""Exit code of a joiner whose rendezvous ended in the middle of their meeting."""

TURN = b"your turn"
"""What the bell says to the joiner that is to connect over MPI now."""

_PORT_FILE = "mpi-port"
_NETMOD = "MPIR_CVAR_CH4_NETMOD"
_INTERFACE_VARIABLES = ("FI_TCP_IFACE", "UCX_NET_DEVICES")
_TAG = 1
_POLL_INTERVAL_S = 0.0005


class MpiError(MeetingError):
    """MPI failed, or the peer ended: this process must make no more MPI calls."""


class MeetingPlace(BaseModel):
    """Where the desk can be met: its MPI port, its bell, and what its MPI goes by.

    interface: as the run file names it, for every node; None where each finds its own.
    """

    model_config = ConfigDict(frozen=True)

    mpi_port: str
    bell_host: str
    bell_port: int
    interface: str | None
    netmod: str

    def write(self, run_directory: Path) -> None:
        """Replaces the run's meeting place; readers see the old one or this one, whole."""
        write_whole(port_file(run_directory), self.model_dump_json(), mode=0o600)

    @classmethod
    def read(cls, run_directory: Path) -> MeetingPlace | None:
        """The present meeting place; None while there is none."""
        try:
            return cls.model_validate_json(port_file(run_directory).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise MeetingError(f"{port_file(run_directory)}: not a meeting place") from error


def port_file(run_directory: Path) -> Path:
    return run_directory / _PORT_FILE


class Watchdog:
    """Ends this process when something takes too long that cannot be interrupted."""

    def __init__(self, name: str) -> None:
        self._name = name

    @contextlib.contextmanager
    def limit(self, limit_s: float, waits_for: str) -> Iterator[None]:
        """Within this block at most `limit_s` may pass; else exit with EXIT_STUCK."""
        done = threading.Event()

        def watch() -> None:
            if not done.wait(limit_s):
                end_process(f"[{self._name}] waited {limit_s:g} s for {waits_for}", EXIT_STUCK)

        quiet_thread(watch, f"watchdog-{waits_for}")
        try:
            yield
        finally:
            done.set()


def end_process(message: str, code: int) -> None:
    """Says why on standard error and ends the process at once, whatever its threads do."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{message}\n".encode())
    os._exit(code)


def start_mpi(host: str, interface: str | None = None, netmod: str | None = None) -> str:
    """Initialises MPI in this process, and says by which netmod.

    host: the desk's address; without an `interface`, that on the way there is taken. An interface
    or netmod that is given beats the environment, which beats all else.

    SIGTERM and SIGINT wait meanwhile, so that they find nothing of MPI's in /dev/shm. Raises
    MeetingError when MPI cannot be loaded; like every function below MpiError when it fails.
    """
    chosen = _choose_network(host, interface, netmod)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py itself, or the library that it loads
        raise MeetingError(f"MPI cannot be loaded ({error}); pip install mpi4py mpich") from error
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with _mpi_errors("MPI_Init_thread"):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _unlink_shared_memory()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return chosen


def _choose_network(host: str, interface: str | None, netmod: str | None) -> str:
    """Tells MPICH, libfabric and UCX by the environment; the netmod."""
    if netmod is not None:
        os.environ[_NETMOD] = netmod
    # ofi reports a dead peer where ucx crashes; tcp is there on every machine, and fast enough.
    os.environ.setdefault(_NETMOD, "ofi")
    os.environ.setdefault("FI_PROVIDER", "tcp")
    os.environ.setdefault("UCX_TLS", "tcp,self")
    found = interface_towards(host)
    # UCX crashes over the loopback interface when it is told to use it alone.
    variables = _INTERFACE_VARIABLES[:1] if is_loopback(host) else _INTERFACE_VARIABLES
    for variable in variables:
        if interface is not None:
            os.environ[variable] = interface
        elif found is not None:
            os.environ.setdefault(variable, found)
    return os.environ[_NETMOD]


def open_port() -> str:
    """A port that joiners can connect to."""
    from mpi4py import MPI

    with _mpi_errors("MPI_Open_port"):
        return MPI.Open_port()


def accept(port: str, deadline: Deadline, gone: threading.Event) -> MPI.Intercomm:
    """The next joiner that connects to `port`.

    Raises DeadlineError when none has come, and MpiError soon after `gone` is set.
    """
    from mpi4py import MPI

    # One second at a time, to notice `gone`. Only MPICH knows this key; with any other MPI the
    # call waits on, and the watchdog ends the process.
    info = MPI.Info.Create({"timeout": "1"})
    while True:
        try:
            return MPI.COMM_SELF.Accept(port, info)
        except MPI.Exception as error:
            if gone.is_set():
                raise MpiError(f"MPI_Comm_accept: {_first_line(error)}") from error
            deadline.check()


def connect(port: str, limit_s: float) -> MPI.Intercomm:
    """Connects to a desk that accepts. To a port that nobody holds any more it may hang."""
    from mpi4py import MPI

    info = MPI.Info.Create({"timeout": str(max(1, round(limit_s)))})
    with _mpi_errors("MPI_Comm_connect"):
        return MPI.COMM_SELF.Connect(port, info)


def make_progress() -> None:
    """Lets MPI answer a peer that still needs it."""
    from mpi4py import MPI

    with _mpi_errors("MPI_Iprobe"):
        MPI.COMM_SELF.Iprobe()


def leave_mpi() -> None:
    """Finalizes MPI; the process goes on without it."""
    from mpi4py import MPI

    with _mpi_errors("MPI_Finalize"):
        MPI.Finalize()


@contextlib.contextmanager
def _mpi_errors(call: str) -> Iterator[None]:
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        raise MpiError(f"{call}: {_first_line(error)}") from error


def _first_line(error: MPI.Exception) -> str:
    return error.Get_error_string().splitlines()[0]


def _unlink_shared_memory() -> None:
    """Takes the name of MPICH's segment away, as MPICH itself would at Finalize.

    Nobody else on this host will attach to it, the world being one process; so the kernel frees
    it however this process ends.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for name in set(re.findall(r"(/dev/shm/mpich_shm_\w+)$", maps, re.MULTILINE)):
        Path(name).unlink(missing_ok=True)


def shared_memory_of(pid: int) -> list[Path]:
    """Segments that a lone MPICH process killed during its initialisation has left."""
    return sorted(Path("/dev/shm").glob(f"mpich_shm_{pid:x}_*"))


class MpiPeer:
    """The one process at the other end of an intercommunicator.

    `gone` is set when it is known from elsewhere that the peer has ended.
    """

    def __init__(
        self, communicator: MPI.Intercomm, deadline: Deadline, gone: threading.Event
    ) -> None:
        self._communicator = communicator
        self._deadline = deadline
        self._gone = gone

    def send(self, data: bytes) -> None:
        """Sends one message. Raises MpiError, or DeadlineError, which is as final."""
        from mpi4py import MPI

        with _mpi_errors("MPI_Isend"):
            self._complete(self._communicator.Isend([data, MPI.BYTE], dest=0, tag=_TAG))

    def receive(self) -> bytes:
        """The next message. Raises MpiError, or DeadlineError, which is as final."""
        from mpi4py import MPI

        with _mpi_errors("MPI_Irecv"):
            status = MPI.Status()
            while not self._communicator.Iprobe(source=0, tag=_TAG, status=status):
                self._pause()
            num_bytes = status.Get_count(MPI.BYTE)
            if not 0 <= num_bytes <= MAX_DIALOGUE_BYTES:
                raise MpiError(f"message of {num_bytes} bytes, at most {MAX_DIALOGUE_BYTES}")
            data = bytearray(num_bytes)
            self._complete(self._communicator.Irecv([data, MPI.BYTE], source=0, tag=_TAG))
            return bytes(data)

    def leave(self) -> None:
        """Disconnects from the peer."""
        with _mpi_errors("MPI_Comm_disconnect"):
            self._communicator.Disconnect()

    def _complete(self, request: MPI.Request) -> None:
        while not request.Test():
            self._pause()

    def _pause(self) -> None:
        """MPI makes progress only when it is asked: waits a moment, unless all is over."""
        if self._gone.wait(_POLL_INTERVAL_S):
            raise MpiError(f"{self._deadline.waits_for} ended in the middle of the meeting")
        self._deadline.check()
