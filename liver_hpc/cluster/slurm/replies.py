"""Pure: what squeue prints, taken apart: lines in formats that every Slurm knows, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from liver_hpc.errors import LiverError

JOB_FORMAT = "%A|%i|%T|%r|%e|%N"
STEP_FORMAT = "%i|%j"  # a name may contain the separator: it comes last
_JSON_SINCE = (23, 2)
"""Before this release `squeue --json` had no regard to which jobs were asked for."""

RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_LASTING = {*_QUEUED, "CONFIGURING", RUNNING, COMPLETING, "SUSPENDED", "STOPPED", "SIGNALING"}
_LASTING |= {"STAGE_OUT", "RESIZING"}

# Reasons for which a request would stay pending for ever.
_HOPELESS = (
    "BadConstraints",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionDown",
    "PartitionInactive",
    "InvalidAccount",
    "InvalidQOS",
    "AssocMaxNodePerJobLimit",
    "QOSMaxNodePerJobLimit",
    "JobHeldAdmin",
    "JobHeldUser",
    "JobLaunchFailure",
    "launch failed",
)

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

    @property
    def over(self) -> bool:
        """Whether nothing of it is left on its nodes."""
        return self.state not in _LASTING

    @property
    def queued(self) -> bool:
        """Whether it has not started, or will start again."""
        return self.state in _QUEUED

    @property
    def hopeless(self) -> bool:
        """Whether it is pending and will not start by waiting."""
        return self.state == "PENDING" and self.reason.startswith(_HOPELESS)

    def __str__(self) -> str:
        """`queued as job 12: PENDING (Resources)`, `job 12 is RUNNING on n1`."""
        if self.queued:
            reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
            return f"queued as job {self.job_id}: {self.state}{reason}"
        return f"job {self.job_id} is {self.state} on {','.join(self.nodes) or 'no node'}"


def speaks_json(version: str) -> bool:
    """Whether a Slurm of this version, such as "slurm 22.05.8", answers in JSON as wanted here."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= _JSON_SINCE


def jobs_of_lines(printed: str, hostnames: Hostnames) -> dict[str, JobInfo]:
    """Jobs by their own id, from lines in JOB_FORMAT. Raises LiverError for other ones."""
    found = [_job_of_line(line, hostnames) for line in printed.splitlines() if line.strip()]
    return {job.job_id: job for job in found}


def _job_of_line(line: str, hostnames: Hostnames) -> JobInfo:
    fields = line.strip().split("|")
    if len(fields) != 6:
        raise LiverError(f"squeue: wanted 6 fields, got {line!r}")
    job_id, shown, state, reason, end, nodes = fields
    leader, plus, _ = shown.partition("+")
    ends_s = float(end) if end.isdecimal() and int(end) > 0 else None
    het_leader = leader if plus else None
    return JobInfo(job_id, het_leader, state, reason, hostnames(nodes), ends_s)


def jobs_of_json(printed: str, hostnames: Hostnames) -> dict[str, JobInfo]:
    """The same from `squeue --json`. Raises LiverError for what is no such answer."""
    try:
        found = [_job_of_json(job, hostnames) for job in json.loads(printed)["jobs"]]
    except (ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise LiverError(f"squeue --json: wanted jobs, got {printed[:80]!r} ({got})") from error
    return {job.job_id: job for job in found}


def _job_of_json(job: Mapping[str, Any], hostnames: Hostnames) -> JobInfo:
    state = job["job_state"]
    if not isinstance(state, str):  # 23.11 lists the state and its flags
        flags = (word for word in (COMPLETING, "CONFIGURING") if word in state)
        state = next(flags, state[0])
    leader, ends_s = _number(job["het_job_id"]), _number(job["end_time"])
    return JobInfo(
        job_id=str(job["job_id"]),
        het_leader=str(leader) if leader else None,
        state=state,
        reason=job["state_reason"],
        nodes=hostnames(job["nodes"] or ""),
        ends_s=float(ends_s) if ends_s else None,
    )


def _number(value: Any) -> int | None:
    """An optional number: itself, or `{"set": true, "infinite": false, "number": 7}`."""
    if isinstance(value, dict):
        return value["number"] if value["set"] and not value["infinite"] else None
    return int(value)


def steps_of_lines(printed: str) -> dict[str, list[str]]:
    """The ids of steps, such as "123.4", by the steps' names, from lines in STEP_FORMAT."""
    found: dict[str, list[str]] = {}
    for line in printed.splitlines():
        step_id, _, name = line.strip().partition("|")
        if step_id:
            found.setdefault(name, []).append(step_id)
    return found
