"""The agent's joiner: a child that is an MPI process for the length of one meeting.

The agent itself never loads MPI, and what listens without a secret (an mpiexec, an MPI library)
is gone from its tree once the meeting is over, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from liver_hpc.errors import MeetingError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded
from liver_hpc.host.marks import kill_marked
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.mpi.calls import EXIT_DESK_LOST, EXIT_STUCK, shared_memory_of
from liver_hpc.rendezvous.mpi.joiner import EXIT_FAILED, EXIT_NOT_MET, joiner_command
from liver_hpc.rendezvous.mpi.process_manager import NO_TOPOLOGY_FILE, inherited_line, under_mpiexec

_MARK = "LIVER_MEETING"
_KILL_S = 5.0
_MAX_OUTPUT_BYTES = 1 << 20
_JOINERS_WORD = frozenset({EXIT_FAILED, EXIT_STUCK, EXIT_DESK_LOST, EXIT_NOT_MET})

_log = logging.getLogger(__name__)


class NotMet(MeetingError):
    """The joiner ended without an answer; `code` is what the agent is to end with."""

    def __init__(self, what: str, code: int = EXIT_NOT_MET) -> None:
        super().__init__(f"no meeting with the rendezvous: {what}")
        self.code = code


@dataclass(frozen=True)
class Launch:
    """How a command is started so that it can enter MPI; `descriptors` are handed down to it."""

    command: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...]


def mpi_launch(command: list[str]) -> Launch:
    """As a plain child where a process manager has started this process, else under an mpiexec.

    Raises ConfigError when there is neither.
    """
    line = inherited_line(os.environ)
    if line is not None:
        # Not SIGKILL: that one could come between MPI's making and unlinking shared memory.
        return Launch(guarded(command, signal.SIGTERM), dict(os.environ), line)
    # SIGKILL: mpiexec forgets a SIGTERM that comes early. Its proxy ends with it, and the joiner.
    environment = {**NO_TOPOLOGY_FILE, **clean_environment(os.environ)}
    return Launch(guarded(under_mpiexec(command)), environment, ())


class JoinerProcess:
    """A joiner under way, with its process manager if it has one of its own.

    To be made by a thread that lives as long as the joiner may. Raises ConfigError when there is
    no way into MPI, OSError when it cannot be started.
    """

    def __init__(self, run_directory: Path, identity: Identity, timeout_s: float) -> None:
        launch = mpi_launch(joiner_command(run_directory, identity, timeout_s))
        self._mark = secrets.token_hex(8)
        self._output = os.memfd_create("joiner's answer")  # unlike a pipe, needs no reader
        self._process = subprocess.Popen(
            launch.command,
            env={**launch.environment, _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            pass_fds=launch.descriptors,
        )
        self.end = os.pidfd_open(self._process.pid)
        """A descriptor that is readable once the joiner has ended."""

    def answer(self) -> Answer | None:
        """The desk's answer, None while the meeting lasts. Raises NotMet when it has failed."""
        code = self._process.poll()
        if code is None:
            return None
        output = os.pread(self._output, _MAX_OUTPUT_BYTES, 0).decode(errors="replace")
        if code == 0:
            with contextlib.suppress(ValidationError):
                return Answer.model_validate_json(output)
        if output:  # hydra, which prints its complaints to standard output
            _log.info("the joiner's output:\n%s", output)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise NotMet(
            f"the joiner ended without an answer ({how})",
            code if code in _JOINERS_WORD else EXIT_NOT_MET,
        )

    def close(self) -> None:
        """Kills what still lives of it; afterwards there is nothing of it on this machine.

        Raises DeadlineError when a process does not end (stuck in the kernel).
        """
        try:
            for process in kill_marked(_MARK, self._mark, _KILL_S):
                for segment in shared_memory_of(process):
                    segment.unlink(missing_ok=True)
            self._process.kill()  # a process has no mark for a moment while it becomes another
            self._process.wait(_KILL_S)
        finally:
            os.close(self.end)
            os.close(self._output)
