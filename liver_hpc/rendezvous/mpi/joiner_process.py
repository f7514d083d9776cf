"""The agent's joiner: a child that is an MPI process for the length of one meeting.

The agent itself never loads MPI, and MPI's port, which asks nobody for a secret, is gone from its
tree once the meeting is over, however that ends.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.mpi.joiner import (
    EXIT_FAILED,
    EXIT_NOT_MET,
    EXIT_RENDEZVOUS_LOST,
    EXIT_STUCK,
)
from liver_hpc.rendezvous.mpi.process import MpiProcess

_MARGIN_S = 2.0
_MAX_OUTPUT_BYTES = 1 << 20
_JOINERS_WORD = frozenset({EXIT_FAILED, EXIT_STUCK, EXIT_RENDEZVOUS_LOST, EXIT_NOT_MET})


class NotMet(MeetingError):
    """The joiner ended without an answer; `code` is what the agent is to end with."""

    def __init__(self, what: str, code: int = EXIT_NOT_MET) -> None:
        super().__init__(f"no meeting with the rendezvous: {what}")
        self.code = code


class JoinerProcess:
    """A joiner under way.

    To be made by a thread that lives as long as the joiner may. Raises OSError when it cannot be
    started.
    """

    def __init__(self, run_directory: Path, identity: Identity, timeout_s: float) -> None:
        self._output = os.memfd_create("joiner's answer")  # unlike a pipe, needs no reader
        words = [str(os.getpid()), str(run_directory), str(timeout_s), identity.model_dump_json()]
        self._process = MpiProcess(
            ["-m", "liver_hpc.rendezvous.mpi.joiner", *words],
            output=self._output,
            deadline=Deadline.after(SystemClock(), timeout_s + _MARGIN_S, "the joiner to end"),
        )
        self.end = os.pidfd_open(self._process.pid)
        """A descriptor that is readable once the joiner has ended."""

    def answer(self) -> Answer | None:
        """The rendezvous's answer, None while the meeting lasts. Raises NotMet when it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            with contextlib.suppress(ValidationError):
                return Answer.model_validate_json(os.pread(self._output, _MAX_OUTPUT_BYTES, 0))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise NotMet(
            f"the joiner ended without an answer ({how})",
            code if code in _JOINERS_WORD else EXIT_NOT_MET,
        )

    def close(self) -> None:
        """Kills it if it still lives; afterwards there is nothing of it on this machine.

        Raises DeadlineError when it does not end (stuck in the kernel).
        """
        try:
            self._process.end()
        finally:
            os.close(self.end)
            os.close(self._output)
