"""Slurm's commands, and what they print taken apart: a deadline on every call, retries while the
controller does not answer. Nothing here decides anything.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Clock, Deadline, SystemClock
from liver_hpc.cluster.slurm.replies import (
    JOB_FORMAT,
    STEP_FORMAT,
    JobInfo,
    job_of_step,
    jobs_of_lines,
    steps_of_lines,
    steps_of_records,
)
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.process import clean_environment

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
_NO_STEP = (*_UNKNOWN_JOB, "not found")
_OVER = (*_UNKNOWN_JOB, "already completing or completed", "Job/step already")

_log = logging.getLogger(__name__)


class SlurmError(LiverError):
    """A command of Slurm failed: its words, its exit code and what it complained about."""

    def __init__(self, line: Sequence[str], code: int, complaint: str) -> None:
        super().__init__(f"{' '.join(line)}: exit code {code}: {complaint or 'said nothing'}")
        self.code, self.complaint = code, complaint


class ControllerUnreachable(SlurmError):
    """The controller is busy or absent: whether the command was carried out is not known."""


@dataclass(frozen=True)
class PartitionInfo:
    """grace_s: seconds between a preemption's warning and its kill. preempt_mode: "OFF" where
    jobs are not preempted. nodes: Slurm's node list. default: jobs that name none come here."""

    name: str
    grace_s: float
    preempt_mode: str
    nodes: str
    default: bool = False


_HERE = ("--local", "--all")
"""For squeue and sinfo: of this cluster, as in a federation one that does not answer would look
like one without our jobs; and of hidden partitions, too."""
_PREFERENCES = ("SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCT_", "SBATCH_CLUSTERS")
"""Variables of users that would hide jobs, have questions asked, or lead to another cluster."""
_OF_NEW_JOBS = {f"SBATCH_{name}" for name in ("EXPORT", "WAIT", "ARRAY_INX", "ERROR", "SIGNAL")}
"""Likewise, that would keep the environment from a job, in which neither Python nor a recipe would
be found, have sbatch wait for its end, make an array of it, keep its errors from its log, or end
by an early signal what keeps burst nodes."""

CommandRunner = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""Runs a command for at most so many seconds; raises TimeoutExpired, FileNotFoundError."""


def run_command(
    words: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm in the environment of no job, with times in epoch seconds, and
    without what a user would have squeue and others show or ask of him.

    `environment` is taken instead, as it is otherwise: a job that sbatch queues inherits it.
    """
    if environment is None:
        own = clean_environment(os.environ)
        environment = {**own, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    known = {
        name: value
        for name, value in environment.items()
        if name not in _OF_NEW_JOBS and not name.startswith(_PREFERENCES)
    }
    return subprocess.run(
        list(words),
        env=known,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=limit_s,
    )


class Pace:
    """Lets callers go on one by one, so much time after each other."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._clock = SystemClock()
        self._next = Deadline.after(self._clock, 0.0, "nobody")
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            turn_s = self._next.remaining_s()
            self._next = Deadline.after(self._clock, turn_s + self.interval_s, "squeue's turn")
        threading.Event().wait(turn_s)

    def await_turn(self) -> None:
        """Returns when the next one may go on, and is not the next one."""
        threading.Event().wait(self._next.remaining_s())


SQUEUE_PACE = Pace(1.1)
"""Of this process: no two questions of squeue are ever seen within a second, whoever asks."""


def sbatch_words(options: Sequence[str], script: Path, told: Sequence[str] = ()) -> list[str]:
    """The command line that submits `script`, which is told `told`."""
    return ["sbatch", "--parsable", *options, str(script), *told]


class SlurmCommands:
    """The cluster by its commands; any thread may call.

    command_s: the longest that one command may take. unreachable_s: how long a call is repeated
    while the controller does not answer. Every call raises ControllerUnreachable when that was not
    enough, and SlurmError when Slurm refuses.
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
        self._hosts: dict[str, tuple[str, ...]] = {}

    def once(self) -> SlurmCommands:
        """The same cluster, nothing repeated."""
        same = copy.copy(self)
        same._unreachable_s = 0.0
        return same

    # ---- jobs

    def sbatch(self, options: Sequence[str], script: Path, told: Sequence[str] = ()) -> str:
        """Submits `script`, which is told `told`; the job's id (a het job's leader)."""
        words = sbatch_words(options, script, told)
        printed = self._call(words)
        # "123" or "123;cluster", among whatever a site's wrapper prints.
        if not (found := re.findall(r"^(\d+)(?:;\S*)?$", printed, re.M)):
            raise SlurmError(words, 0, f"wanted a job id, got {printed!r}")
        return str(found[-1])

    def cancel(self, job: str, signal: str = "") -> None:
        """Ends a job, a component ("123+1", or its own id) or a step ("123.4").

        With `signal`, that signal is sent instead. What is over already is fine.
        """
        self._call(["scancel", *([f"--signal={signal}"] if signal else []), job], _OVER)

    def cancel_named(self, name: str) -> None:
        """Ends all jobs of this user that have this name, also pending ones."""
        self._call(["scancel", f"--user={os.geteuid()}", f"--name={name}"], _OVER)

    def requeue(self, job: str) -> None:
        """Ends a job and has it start again later, unless it is queued again already."""
        self._call(["scontrol", "requeue", job], ("Job is pending execution",))

    def keep_ended(self, jobs: Sequence[str]) -> None:
        """Has none of these queued again once it ends, whatever it was submitted with."""
        self._call(["scontrol", "update", f"JobId={','.join(jobs)}", "Requeue=0"])

    def jobs(self, ids: Sequence[str], own: bool = False) -> dict[str, JobInfo]:
        """Those of `ids` that are not over, by their own id; a leader's id means all components.
        own: they are this user's, so that Slurm need not send several out of the whole queue.

        Jobs that nobody knows, or knows no longer, are absent.
        """
        if not ids:
            return {}
        whose = [f"--user={os.geteuid()}"] if own and len(ids) > 1 else []
        return self._squeue(*whose, f"--jobs={','.join(ids)}")

    def nodes_of(self, job: str) -> tuple[str, ...]:
        """Those that a job holds that is not over."""
        if (info := self.jobs([job]).get(job)) is None:
            raise LiverError(f"Slurm lists no job {job}")
        return info.nodes

    def has_lost_its_script(self, job: str, or_silent: bool = False) -> bool | None:
        """Whether a batch job goes on without the node that ran its script, as --no-kill has it;
        or_silent: or that node does not answer. None where it does not run, or has none."""
        row = self.record(job)
        # The flag of a script that could not be launched once is 2.
        if row.get("JobState") != "RUNNING" or row.get("BatchFlag", "0") == "0":
            return None
        host = row["BatchHost"]
        if host not in self.hostnames(row["NodeList"]):
            return True
        state = self.node_states([host]).get(host, "") if or_silent else ""
        return "not_responding" in state or "down" in state

    def record(self, job: str) -> dict[str, str]:
        """What scontrol shows of this job, not of other tasks of its array; of a job that nobody
        knows nothing."""
        asked = ["scontrol", "--oneliner", "show", "job", job]
        lines = self._call(asked, _UNKNOWN_JOB).splitlines()
        rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
        return next((row for row in rows if row.get("JobId") == job), {})

    def named(self, name: str) -> dict[str, JobInfo]:
        """The jobs of this user with this name that are not over."""
        return self._squeue(f"--user={os.geteuid()}", f"--name={name}")

    def _squeue(self, *which: str) -> dict[str, JobInfo]:
        asked = ["squeue", *_HERE, "--noheader", *which, f"--format={JOB_FORMAT}"]
        return jobs_of_lines(self._call(asked, _UNKNOWN_JOB), self.hostnames)

    def steps(self, jobs: Sequence[str]) -> dict[str, list[str]]:
        """The ids, such as "123.4", of these jobs' steps that have not ended, by the steps' names;
        a component is asked for by its own id.

        With enable_stepmgr a job's own node knows its steps, and squeue does not ask that one; what
        it lists no step of is asked for by itself. A node that does not answer has none then.
        """
        if not jobs:
            return {}
        which = ["--noheader", "--steps", f"--jobs={','.join(jobs)}", f"--format={STEP_FORMAT}"]
        found = steps_of_lines(self._call(["squeue", *_HERE, *which], _UNKNOWN_JOB))
        listed = {job for ids in found.values() for job in map(job_of_step, ids)}
        for job in sorted({*jobs} - listed):
            asked = ["scontrol", "--local", "--all", "--oneliner", "show", "step", job]
            for name, ids in steps_of_records(self._call(asked, _NO_STEP)).items():
                found.setdefault(name, []).extend(ids)
        return found

    def run_step(self, words: Sequence[str]) -> str:
        """Runs an srun to its end, which has to be near; what its tasks print."""
        return self._call(words)

    # ---- the cluster

    def node_states(self, names: Sequence[str]) -> dict[str, str]:
        """Each node's state with its flags, such as "allocated+drain", "idle" or "down"."""
        which = ["--noheader", "--Node", f"--nodes={','.join(names)}"]
        asked = ["sinfo", *_HERE, *which, "--Format=NodeList:|,StateComplete:|"]
        lines = self._call(asked).splitlines() if names else []
        rows = [line.strip().split("|") for line in lines]  # one for every partition of a node
        return {row[0]: row[1].lower() for row in rows if len(row) >= 2}

    def hostnames(self, nodelist: str) -> tuple[str, ...]:
        """The nodes of "n[1-3,7]", in order; asks no controller."""
        if not set(nodelist) & set("[,"):
            return (nodelist,) if nodelist else ()
        if nodelist not in self._hosts:
            named = self._call(["scontrol", "show", "hostnames", nodelist])
            self._hosts[nodelist] = tuple(named.split())
        return self._hosts[nodelist]

    def partitions(self) -> dict[str, PartitionInfo]:
        """All partitions by name, hidden ones too: a job may be submitted to them."""
        lines = self._call(["scontrol", "--all", "--oneliner", "show", "partition"]).splitlines()
        rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
        found = [
            PartitionInfo(
                name=row["PartitionName"],
                grace_s=float(row.get("GraceTime", "0")),
                preempt_mode=row.get("PreemptMode", "OFF"),
                nodes=row.get("Nodes", "").replace("(null)", ""),
                default=row.get("Default") == "YES",
            )
            for row in rows
            if "PartitionName" in row
        ]
        return {partition.name: partition for partition in found}

    def setting(self, name: str) -> str:
        """A value of Slurm's configuration as Slurm shows it: setting("KillWait") == "30 sec". From
        23.11 on there is no plugin where it was called none before."""
        asked = ["scontrol", "show", "config"]
        found = re.search(rf"^\s*{re.escape(name)}\s*=(.*)$", self._call(asked), re.I | re.M)
        if found is None:
            raise SlurmError(asked, 0, f"there is no setting {name!r}")
        value = found[1].strip()
        return "none" if value == "(null)" else value

    def check_cluster(self, environment: Mapping[str, str]) -> None:
        """Raises ConfigError where `environment` has sbatch submit to other clusters than this."""
        for variable in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
            named = environment.get(variable, "").lower()
            if named and (here := self.setting("ClusterName")).lower() not in named.split(","):
                raise ConfigError(
                    f"{variable} names cluster {named}, and Slurm's configuration is that of "
                    f"{here}, to which liver submits: submit slurm/liver.sbatch by `sbatch -M "
                    f"{named}`, or set SLURM_CONF to the configuration of {named}"
                )

    # ---- how

    def _call(self, line: Sequence[str], fine: Sequence[str] = ()) -> str:
        """What the command prints; a complaint that contains one of `fine` is none."""
        patience = Deadline.after(self._clock, self._unreachable_s, "the controller")
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._once(line, fine)
            except ControllerUnreachable as error:
                if patience.expired():
                    raise
                _log.warning("%s; again in %g s", error, pause_s)
                threading.Event().wait(min(pause_s, patience.remaining_s()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _once(self, line: Sequence[str], fine: Sequence[str]) -> str:
        if line[0] == "squeue":
            SQUEUE_PACE.wait()
        try:
            done = self._run(line, self._command_s)
        except subprocess.TimeoutExpired:
            raise ControllerUnreachable(line, 124, f"no answer in {self._command_s:g} s") from None
        except OSError as error:
            raise SlurmError(line, 127, str(error)) from error
        complaint = done.stderr.strip() or done.stdout.strip()
        if done.returncode == 0 or any(known in complaint for known in fine):
            return done.stdout
        if any(known in complaint for known in _UNREACHABLE):
            raise ControllerUnreachable(line, done.returncode, complaint)
        raise SlurmError(line, done.returncode, complaint)
