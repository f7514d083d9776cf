"""Child processes that enter MPI, each as a world of its own; the joiner of an agent is one.

The agent itself never loads MPI, and MPI's port, which asks nobody for a secret, is gone from its
tree once the meeting is over, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from liver_hpc.errors import MeetingError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.process import clean_environment, quiet_thread
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.mpi.joiner import (
    EXIT_FAILED,
    EXIT_NOT_MET,
    EXIT_RENDEZVOUS_LOST,
    EXIT_STUCK,
)
from liver_hpc.rendezvous.mpi.pmi import PmiServer, serve, shared_memory_of

_JOINERS_WORD = frozenset({EXIT_FAILED, EXIT_STUCK, EXIT_RENDEZVOUS_LOST, EXIT_NOT_MET})


class MpiProcess(Child):
    """This Python with `words`, to which this process is the process manager as long as it lives.

    variables: added to the environment. Otherwise as `Command` and `Child` have it.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
        log: Path | None = None,
    ) -> None:
        pmi = PmiServer()
        self._segment = shared_memory_of(pmi.world)
        mine, theirs = socket.socketpair()
        quiet_thread(lambda: serve(pmi, mine), "pmi")
        with theirs:
            manager = {
                "PMI_FD": str(theirs.fileno()),
                "PMI_RANK": "0",
                "PMI_SIZE": "1",
                "MPIR_CVAR_PMI_VERSION": "1",
            }
            super().__init__(
                Command(
                    name,
                    [sys.executable, "-P", *words],
                    # Not SIGKILL: that could come between MPI's making and unlinking shared memory.
                    orphan_signal=signal.SIGTERM,
                    environment={**clean_environment(os.environ), **(variables or {}), **manager},
                    stdout=stdout,
                    log=log,
                    pass_fds=(theirs.fileno(), *pass_fds),
                    apart="session",
                )
            )

    def _release(self) -> None:
        super()._release()
        # It may have been killed before it could take the name away itself.
        self._segment.unlink(missing_ok=True)


class NotMet(MeetingError):
    """The joiner ended without an answer; `code` is what the agent is to end with."""

    def __init__(self, what: str, code: int = EXIT_NOT_MET) -> None:
        super().__init__(f"no meeting with the rendezvous: {what}")
        self.code = code


class JoinerProcess(MpiProcess):
    """A joiner under way. Its answer fits a pipe that nobody reads yet."""

    def __init__(self, run_directory: Path, identity: Identity, timeout_s: float) -> None:
        module = ["-m", "liver_hpc.rendezvous.mpi.joiner"]
        words = [*module, str(run_directory), str(timeout_s), identity.model_dump_json()]
        super().__init__("the joiner", words, stdout=subprocess.PIPE)

    def answer(self) -> Answer | None:
        """The rendezvous's answer, None while the meeting lasts. Raises NotMet when it failed."""
        code = self.exit_code()
        if code is None:
            return None
        if code == 0:
            with contextlib.suppress(ValidationError):
                return Answer.model_validate_json(self.stdout.readline())
        raise NotMet(
            f"the joiner ended without an answer ({self.how()})",
            code if code in _JOINERS_WORD else EXIT_NOT_MET,
        )

    def close(self) -> None:
        """Kills it if it still lives. Raises DeadlineError when it does not end."""
        with self.stdout:
            self.end(0.0)
