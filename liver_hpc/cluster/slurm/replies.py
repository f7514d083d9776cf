"""Pure: what squeue prints, taken apart: lines in formats that every Slurm knows. Not JSON: before
24.05.1 all jobs of the cluster are in it, whichever were asked for, and a Slurm may lack it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.errors import LiverError

JOB_FORMAT = "%A|%i|%T|%r|%e|%N|%j"  # a name may contain the separator: it comes last
STEP_FORMAT = "%i|%j"

RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
SUSPENDED = "SUSPENDED"
_HELD = "RESV_DEL_HOLD"
"""Of a job whose reservation is gone; its reason is a sentence that names the reservation."""
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", _HELD, "SPECIAL_EXIT"}
_QUEUED |= {"EXPEDITING", "CONFIGURING"}  # its nodes boot, which may take half an hour
_LASTING = {*_QUEUED, RUNNING, COMPLETING, SUSPENDED, "STOPPED", "SIGNALING"}
_LASTING |= {"STAGE_OUT", "RESIZING"}

# Reasons for which a request would stay pending for ever.
_HOPELESS = (
    "AccountNotAllowed",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "MaxMemPerLimit",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionDown",
    "PartitionInactive",
    "InvalidAccount",
    "InvalidQOS",
    "JobHeldAdmin",
    "JobHeldUser",
    "JobLaunchFailure",
    "QOSMin",
    "QOSNotAllowed",
    "ReservationDeleted",
    "ReservationInvalid",
    "launch failed",
    # squeue shows these for AccountNotAllowed and QOSNotAllowed where Slurm has given details.
    "Job's account not",
    "Job's QOS not",
    "uid ",  # "1000 not in group permitted to use this partition"
)
_OF_ONE_JOB = re.compile(r"(Assoc|QOS)Max\w+Per(Job|Node)")
"""A limit that the request itself is over, as AssocMaxWallDurationPerJobLimit."""

Hostnames = Callable[[str], tuple[str, ...]]
"""The nodes of "n[1-3,7]", in order."""


@dataclass(frozen=True)
class JobInfo:
    """A job, or one component of a het job under its own id.

    het_leader: the het job's id; None for a plain job. state: in Slurm's long words, such as
    "RUNNING". ends_s: when its time is up, epoch seconds; for a job under preemption, the end of
    its grace time. None where that is open.
    """

    job_id: str
    het_leader: str | None
    state: str
    reason: str
    nodes: tuple[str, ...]
    ends_s: float | None
    name: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of it is left on its nodes."""
        return self.state not in _LASTING

    @property
    def queued(self) -> bool:
        """Whether it has not started, or will start again."""
        return self.state in _QUEUED

    @property
    def ready(self) -> bool:
        """Whether steps can begin on its nodes. With PrologFlags=Alloc a job runs while their
        prolog does; an srun that has to wait for that gives up."""
        return self.state == RUNNING and self.reason != "Prolog" and bool(self.nodes)

    @property
    def hopeless(self) -> bool:
        """Whether it is pending and will not start by waiting."""
        hopeless = self.reason.startswith(_HOPELESS) or _OF_ONE_JOB.match(self.reason)
        return self.state == _HELD or (self.state == "PENDING" and bool(hopeless))

    def __str__(self) -> str:
        """`queued as job 12: PENDING (Resources)`, `job 12 is RUNNING on n1`."""
        if self.queued:
            reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
            return f"queued as job {self.job_id}: {self.state}{reason}"
        return f"job {self.job_id} is {self.state} on {','.join(self.nodes) or 'no node'}"


def jobs_of_lines(printed: str, hostnames: Hostnames) -> dict[str, JobInfo]:
    """Jobs by their own id, from lines in JOB_FORMAT. Raises LiverError for other ones."""
    found = [_job_of_line(line, hostnames) for line in printed.splitlines() if line.strip()]
    return {job.job_id: job for job in found}


def _job_of_line(line: str, hostnames: Hostnames) -> JobInfo:
    fields = line.strip().split("|", 6)
    if len(fields) != 7:
        raise LiverError(f"squeue: wanted 7 fields, got {line!r}")
    job_id, shown, state, reason, end, nodes, name = fields
    leader, plus, _ = shown.partition("+")
    ends_s = float(end) if end.isdecimal() and int(end) > 0 else None
    het_leader = leader if plus else None
    return JobInfo(job_id, het_leader, state, reason, hostnames(nodes), ends_s, name)


def steps_of_lines(printed: str) -> dict[str, list[str]]:
    """The ids of steps, such as "123.4", by the steps' names, from lines in STEP_FORMAT."""
    found: dict[str, list[str]] = {}
    for line in printed.splitlines():
        step_id, _, name = line.strip().partition("|")
        if step_id:
            found.setdefault(name, []).append(step_id)
    return found


def steps_of_records(printed: str) -> dict[str, list[str]]:
    """The same of an srun's steps from the lines of `scontrol --oneliner show step`."""
    records = re.findall(r"^StepId=([^.\s]+\.\d\S*) .* Name=(.+) Network=", printed, re.M)
    return steps_of_lines("\n".join("|".join(record) for record in records))


def job_of_step(step_id: str) -> str | None:
    """`123` of `123.4`; None of `123.batch` and others that no srun began."""
    job, _, number = step_id.partition(".")
    return job if number.isdecimal() else None
