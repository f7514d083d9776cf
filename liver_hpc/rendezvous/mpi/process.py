"""A child process that enters MPI as a world of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError
from liver_hpc.host.lifeline import quiet_thread
from liver_hpc.host.process import clean_environment
from liver_hpc.rendezvous.mpi.pmi import PmiServer, serve, shared_memory_of

_END_S = 5.0


class MpiProcess(subprocess.Popen[bytes]):
    """Runs this Python with `words`, and is its process manager for as long as it lives.

    The child is to end itself with its parent. Raises OSError.

    variables: added to the environment, which is cleaned of other launches. descriptors: handed
    down. deadline: when the process manager hangs up on a child that still lives; None: never.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: int | IO[bytes],
        errors: IO[bytes] | None = None,
        variables: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        deadline: Deadline | None = None,
    ) -> None:
        pmi = PmiServer()
        self._segment = shared_memory_of(pmi.world)
        mine, theirs = socket.socketpair()
        try:
            super().__init__(
                [sys.executable, "-P", *words],
                env={
                    **clean_environment(os.environ),
                    **(variables or {}),
                    "PMI_FD": str(theirs.fileno()),
                    "PMI_RANK": "0",
                    "PMI_SIZE": "1",
                    "MPIR_CVAR_PMI_VERSION": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(theirs.fileno(), *descriptors),
                start_new_session=True,
            )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        self._service = quiet_thread(lambda: serve(pmi, mine, deadline), "pmi")

    def end(self) -> None:
        """Kills it if it still lives; afterwards nothing of it is left on this machine.

        Raises DeadlineError when it does not end (stuck in the kernel).
        """
        self.kill()
        try:
            self.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"waited {_END_S:g} s for killed process {self.pid} to end"
            ) from None
        self._service.join(_END_S)
        # It may have been killed before it could take the name away itself.
        self._segment.unlink(missing_ok=True)
