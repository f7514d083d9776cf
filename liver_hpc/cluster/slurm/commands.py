"""Slurm's commands: a deadline on every call, retries while the controller does not answer.

Nothing here decides anything. `words` has the command lines, `replies` takes apart what they print.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Clock, SystemClock
from liver_hpc.cluster.slurm import words
from liver_hpc.cluster.slurm.replies import (
    JobInfo,
    PartitionInfo,
    StepInfo,
    is_one_host,
    parse_config,
    parse_job_id,
    parse_job_line,
    parse_node_states,
    parse_partition,
    parse_step_line,
)
from liver_hpc.errors import LiverError
from liver_hpc.host.environment import clean_environment

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0

_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Connection reset",
    "No route to host",
    "Slurm temporarily unable",
    "Slurm backup controller in standby mode",
    "Zero Bytes were transmitted or received",
    "Unexpected message received",
    "Unable to confirm allocation",
    "Transport endpoint is not connected",
    "Communication connection failure",
    "Failed to open a connection",
    "Munge encode failed",
    "Resource temporarily unavailable",
)
_UNKNOWN_JOB = ("Invalid job id",)
_OVER = (*_UNKNOWN_JOB, "already completing or completed", "Job/step already")

_log = logging.getLogger(__name__)


class SlurmError(LiverError):
    """A command of Slurm failed: its words, its exit code and what it complained about."""

    def __init__(self, line: Sequence[str], code: int, complaint: str) -> None:
        super().__init__(f"{' '.join(line)}: exit code {code}: {complaint or 'said nothing'}")
        self.code = code
        self.complaint = complaint


class ControllerUnreachable(SlurmError):
    """The controller is busy or absent: whether the command was carried out is not known."""


@dataclass(frozen=True)
class Answer:
    """How a command ended, and what it printed."""

    code: int
    output: str
    complaint: str = ""


CommandRunner = Callable[[Sequence[str], float], Answer]
"""Runs a command for at most so many seconds; raises TimeoutError, FileNotFoundError."""


def run_command(
    words: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> Answer:
    """Runs a command of Slurm in the environment of no job, with times in epoch seconds.

    `environment` is taken instead, as it is: a job that sbatch queues inherits it.
    """
    if environment is None:
        own = clean_environment(os.environ)
        environment = {**own, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(words),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    output, complaint = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return Answer(done.returncode, output, complaint)


class SlurmCommands:
    """The cluster by its commands; any thread may call.

    command_s: the longest that one command may take. unreachable_s: how long a call is repeated
    while the controller does not answer, unless it says `retry=False`. Every call raises
    ControllerUnreachable when that was not enough, and SlurmError when Slurm refuses.
    """

    def __init__(
        self,
        command_s: float,
        unreachable_s: float,
        clock: Clock | None = None,
        run: CommandRunner = run_command,
    ) -> None:
        self._command_s = command_s
        self._unreachable_s = unreachable_s
        self._clock = clock or SystemClock()
        self._run = run
        self._closed = threading.Event()
        self._hosts: dict[str, tuple[str, ...]] = {}

    def with_timeout(self, command_s: float) -> SlurmCommands:
        """The same cluster asked with another deadline, and nothing repeated."""
        return SlurmCommands(command_s, 0.0, self._clock, self._run)

    def close(self) -> None:
        """No call pauses or is repeated any more; those that pause now end at once."""
        self._closed.set()

    # ---- jobs

    def sbatch(
        self,
        arguments: Sequence[str],
        script: Path,
        told: Sequence[str] = (),
        retry: bool = True,
    ) -> str:
        """Submits `script`, which is told `told`; the job's id (a het job's leader)."""
        return parse_job_id(self._call(words.sbatch(arguments, script, told), retry))

    def cancel(self, job: str, signal: str = "", retry: bool = True) -> None:
        """Ends a job, a component ("123+1", or its own id) or a step ("123.4").

        With `signal`, that signal is sent instead. What is over already is fine.
        """
        self._call(words.cancel(job, signal), retry, fine=_OVER)

    def cancel_named(self, name: str, retry: bool = True) -> None:
        """Ends all jobs of this user that have this name, also pending ones."""
        self._call(words.cancel_named(name, os.geteuid()), retry, fine=_OVER)

    def requeue(self, job: str, retry: bool = True) -> None:
        """Ends a job and has it start again later."""
        self._call(words.requeue(job), retry)

    def jobs(self, ids: Sequence[str], retry: bool = True) -> dict[str, JobInfo]:
        """Those of `ids` that are not over, by their own id; a leader's id means all components.

        Jobs that nobody knows, or knows no longer, are absent.
        """
        if not ids:
            return {}
        return self._squeue(words.jobs(ids), retry)

    def named(self, name: str, retry: bool = True) -> dict[str, JobInfo]:
        """The jobs of this user with this name that are not over."""
        return self._squeue(words.jobs_named(name, os.geteuid()), retry)

    def _squeue(self, line: Sequence[str], retry: bool) -> dict[str, JobInfo]:
        lines = self._call(line, retry, fine=_UNKNOWN_JOB).splitlines()
        found = [parse_job_line(line, self.hostnames) for line in lines if line.strip()]
        return {job.job_id: job for job in found}

    def steps(self, job: str, retry: bool = True) -> list[StepInfo]:
        """The steps of a job that have not ended; a component is asked for by its own id."""
        lines = self._call(words.steps(job), retry, fine=_UNKNOWN_JOB).splitlines()
        return [parse_step_line(line, self.hostnames) for line in lines if line.strip()]

    # ---- the cluster

    def node_states(self, names: Sequence[str], retry: bool = True) -> dict[str, str]:
        """Each node's state with its flags, such as "allocated+drain", "idle" or "down"."""
        if not names:
            return {}
        return parse_node_states(self._call(words.node_states(names), retry))

    def hostnames(self, nodelist: str) -> tuple[str, ...]:
        """The nodes of "n[1-3,7]", in order; asks no controller."""
        if is_one_host(nodelist):
            return (nodelist,) if nodelist else ()
        if nodelist not in self._hosts:
            self._hosts[nodelist] = tuple(self._call(words.hostnames(nodelist), True).split())
        return self._hosts[nodelist]

    def partitions(self, retry: bool = True) -> dict[str, PartitionInfo]:
        """All partitions by name, hidden ones too: a job may be submitted to them."""
        lines = self._call(words.partitions(), retry).splitlines()
        found = [parse_partition(line) for line in lines if "PartitionName=" in line]
        return {partition.name: partition for partition in found}

    def setting(self, name: str, retry: bool = True) -> str:
        """A value of Slurm's configuration as Slurm shows it: setting("KillWait") == "30 sec"."""
        line = words.configuration()
        settings = parse_config(self._call(line, retry))
        try:
            return settings[name.lower()]
        except KeyError:
            raise SlurmError(line, 0, f"there is no setting {name!r}") from None

    # ---- how

    def _call(self, line: Sequence[str], retry: bool, fine: Sequence[str] = ()) -> str:
        """What the command prints; a complaint that contains one of `fine` is none."""
        began_s = self._clock.now_s()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(line, fine)
            except ControllerUnreachable as error:
                left_s = self._unreachable_s - (self._clock.now_s() - began_s)
                if not retry or left_s <= 0:
                    raise
                _log.warning("%s; again in %g s", error, pause_s)
                if self._closed.wait(min(pause_s, left_s)):
                    raise
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _once(self, line: Sequence[str], fine: Sequence[str]) -> str:
        try:
            answer = self._run(line, self._command_s)
        except TimeoutError:
            raise ControllerUnreachable(line, 124, f"no answer in {self._command_s:g} s") from None
        except OSError as error:
            raise SlurmError(line, 127, str(error)) from error
        complaint = answer.complaint.strip()
        if answer.code == 0 or any(known in complaint for known in fine):
            return answer.output
        if any(known in complaint for known in _UNREACHABLE):
            raise ControllerUnreachable(line, answer.code, complaint)
        raise SlurmError(line, answer.code, complaint)
