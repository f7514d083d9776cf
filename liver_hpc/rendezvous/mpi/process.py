"""A child process that enters MPI as a world of its own, and the line to it.

What has deadlines and secrets never loads MPI. A call of MPI's that hangs or aborts takes nothing
else with it, and MPI's port, which asks nobody for a secret, is gone with the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError, MeetingError
from liver_hpc.host.child import Child, Command, kill_at_last
from liver_hpc.host.process import clean_environment, quiet_thread
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.pmi import (
    FAILED,
    MAX_MESSAGE_BYTES,
    PmiServer,
    serve,
    shared_memory_of,
)

_LOOK_S = 0.02
_LIBRARY = "MPI4PY_LIBMPI"
_BEATS_IT = ("LD_PRELOAD", "MPI4PY_MPIABI")
_MOST_CHARACTERS = 500
"""Of an error that is told: a stranger at MPI's port may have said it."""

ENDPOINT = ("-m", "liver_hpc.rendezvous.mpi.endpoint")


class MpiEnded(MeetingError):
    """An MPI process has ended; its text has the error that it ended for, where it told one."""


class MpiProcess(Child):
    """This Python with `words` and a descriptor's number, the other end of the line to it.

    This process is its process manager as long as it lives. Raises LiverError.
    """

    def __init__(self, name: str, words: Sequence[str], log: Path | None = None) -> None:
        pmi = PmiServer()
        self._segment = shared_memory_of(pmi.world)
        self._line, line = Pipe()
        manager, managed = socket.socketpair()
        quiet_thread(lambda: serve(pmi, manager), "pmi")
        with line, managed:
            environment = {
                **with_library(clean_environment(os.environ)),
                "PMI_FD": str(managed.fileno()),
                "PMI_RANK": "0",
                "PMI_SIZE": "1",
                "MPIR_CVAR_PMI_VERSION": "1",
                # A thread of MPI's would spin, and speak to whoever comes at any time. This
                # beats MPICH_ASYNC_PROGRESS, which Cray's MPICH is told.
                "MPIR_CVAR_ASYNC_PROGRESS": "0",
                # With more of them MPICH has a second segment, which it leaves behind.
                "MPIR_CVAR_CH4_NUM_VCIS": "1",
                "MPI4PY_RC_INITIALIZE": "0",  # this beats what we tell mpi4py as it is imported
            }
            super().__init__(
                Command(
                    name,
                    [sys.executable, "-P", *words, str(line.fileno())],
                    # Not SIGKILL: that could come between MPI's making and unlinking shared memory.
                    orphan_signal=signal.SIGTERM,
                    environment=environment,
                    log=log,
                    pass_fds=(line.fileno(), managed.fileno()),
                    apart="session",
                )
            )

    def enter(self, network: MpiNetwork) -> None:
        """Has it enter MPI. Raises MpiEnded."""
        self.say(json.dumps(network.variables(os.environ)).encode())

    def say(self, data: bytes) -> None:
        """Raises MpiEnded."""
        try:
            self._line.send_bytes(data)
        except OSError as error:
            raise self._ended() from error

    def hear(self, deadline: Deadline, peer: Channel | None = None) -> bytes:
        """What it says next. Raises MpiEnded, DeadlineError, and ChannelClosed once `peer` has
        gone, which the process talks with."""
        try:
            while not self._line.poll(_LOOK_S):
                if peer is not None and is_gone(peer):
                    raise ChannelClosed(f"{deadline.waits_for} has ended")
                deadline.check()
            said = self._line.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if said.startswith(FAILED):
            raise self._ended(said)
        return said

    def await_peer(self, peer: Channel, deadline: Deadline) -> None:
        """Until that says something, and this process nothing. Raises MpiEnded, DeadlineError."""
        ready = wait([self._line, peer.fileno()], deadline.remaining_s())
        if self._line in ready:
            raise self._ended()
        if not ready:
            raise deadline.error()

    def close(self) -> None:
        """Kills it if it still lives; one that is stuck in the kernel is left, and said."""
        kill_at_last(self)
        self._line.close()

    def _release(self) -> None:
        super()._release()
        # It may have been killed before it could take the name away itself. Where it has, another
        # user may have taken the name since.
        with contextlib.suppress(OSError):
            self._segment.unlink()

    def _ended(self, said: bytes = b"") -> MpiEnded:
        """said: the last that was heard of it; what was not heard yet is heard now."""
        with contextlib.suppress(EOFError, OSError):
            while not said.startswith(FAILED) and self._line.poll():
                said = self._line.recv_bytes(MAX_MESSAGE_BYTES)
        text = f"{self.name}, process {self.pid}, has ended"
        if said.startswith(FAILED):
            why = said.removeprefix(FAILED).decode(errors="replace")
            text += f": {' '.join(why.split())[:_MOST_CHARACTERS]}"
        return MpiEnded(text)


def with_library(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, and by it the MPI library of the wheel mpich with what that needs, wherever
    pip has put it, before others of this machine. Without what would beat it: mpi4py looks into its
    own process first, where a profiler that is preloaded may bring another MPI. As it is where it
    names a library, or where there is no such wheel."""
    found = None if _LIBRARY in environment else wheel_library()
    if found is None:
        return {**environment}
    paths = [f"{found.parent}/mpich", str(found.parent), environment.get("LD_LIBRARY_PATH", "")]
    searched = ":".join(filter(None, paths))
    kept = {name: value for name, value in environment.items() if name not in _BEATS_IT}
    return {**kept, _LIBRARY: str(found), "LD_LIBRARY_PATH": searched}


@functools.cache
def wheel_library() -> Path | None:
    """libmpi.so.12 of the wheel mpich; None where the environment has no such file of pip's."""
    try:
        files = importlib.metadata.files("mpich") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == "libmpi.so.12")
    return next((path for path in paths if path.is_file()), None)


def is_gone(peer: Channel, limit_s: float = 0.0) -> bool:
    """Whether a peer that has nothing to say leaves within a time."""
    try:
        peer.receive(limit_s)
    except DeadlineError:
        return False
    except ChannelClosed:
        pass
    return True
