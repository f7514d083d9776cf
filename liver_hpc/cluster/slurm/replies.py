"""Pure: what Slurm's commands print, taken apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.errors import LiverError

# The name comes last: it is the only field that may contain a separator.
JOB_FORMAT = "%A|%i|%T|%r|%e|%N|%j"
STEP_FORMAT = "%i|%j"

PENDING = "PENDING"
RUNNING = "RUNNING"
COMPLETING = "COMPLETING"
_LASTING = {PENDING, "CONFIGURING", RUNNING, COMPLETING, "SUSPENDED", "STOPPED", "SIGNALING"}
_LASTING |= {"STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_HOLD"}

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
"""Expands a node list such as "n[1-3]"."""


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
    name: str

    @property
    def over(self) -> bool:
        """Whether nothing of it is left on its nodes."""
        return self.state not in _LASTING

    @property
    def hopeless(self) -> bool:
        """Whether it is pending and will not start by waiting."""
        return self.state == PENDING and self.reason.startswith(_HOPELESS)


@dataclass(frozen=True)
class PartitionInfo:
    """grace_s: seconds between a preemption's warning and its kill. preempt_mode: "OFF" where
    jobs are not preempted. nodes: Slurm's node list."""

    name: str
    grace_s: float
    preempt_mode: str
    nodes: str


def is_one_host(nodelist: str) -> bool:
    """Whether a node list is a plain name, or empty."""
    return not set(nodelist) & set("[,")


def parse_job_id(printed: str) -> str:
    """The id in what `sbatch --parsable` prints: "123" or "123;cluster"."""
    job = printed.strip().partition(";")[0]
    if not job.isdecimal():
        raise LiverError(f"sbatch --parsable: wanted a job id, got {printed!r}")
    return job


def parse_job_line(line: str, hostnames: Hostnames) -> JobInfo:
    """One line of squeue in JOB_FORMAT."""
    fields = line.strip().split("|", maxsplit=6)
    if len(fields) != 7:
        raise LiverError(f"squeue: wanted 7 fields, got {line!r}")
    job_id, shown, state, reason, end, nodes, name = fields
    leader, plus, _ = shown.partition("+")
    return JobInfo(
        job_id=job_id,
        het_leader=leader if plus else None,
        state=state,
        reason=reason,
        nodes=hostnames(nodes),
        ends_s=float(end) if end.isdecimal() and int(end) > 0 else None,
        name=name,
    )


def parse_node_states(printed: str) -> dict[str, str]:
    """ "NODE|STATE|" lines, one for every partition of a node."""
    states = {}
    for line in printed.splitlines():
        fields = line.strip().split("|")
        if len(fields) >= 2:
            states[fields[0]] = fields[1].lower()
    return states


def is_drained(state: str) -> bool:
    """Whether somebody wants a node's work to end: drain or maintenance, the node itself is up."""
    return bool({"drain", "draining", "drained", "drng"} & _flags(state))


def is_down(state: str) -> bool:
    """Whether a node is lost to its jobs."""
    return bool({"down", "fail", "failing", "power_down", "powered_down"} & _flags(state))


def _flags(state: str) -> set[str]:
    return {flag.rstrip("*~#!%$@^-") for flag in state.split("+")}


def parse_partition(line: str) -> PartitionInfo:
    """One line of `scontrol --all --oneliner show partition`."""
    values = dict(re.findall(r"(\w+)=(\S*)", line))
    try:
        return PartitionInfo(
            name=values["PartitionName"],
            grace_s=float(values.get("GraceTime", "0")),
            preempt_mode=values.get("PreemptMode", "OFF"),
            nodes="" if values.get("Nodes") == "(null)" else values.get("Nodes", ""),
        )
    except (KeyError, ValueError) as error:
        raise LiverError(f"scontrol show partition: {error!r} in {line!r}") from error


def parse_config(printed: str) -> dict[str, str]:
    """`scontrol show config` by its names in lower case."""
    settings = {}
    for line in printed.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip().lower()] = value.strip()
    return settings


def parse_setting_s(value: str, otherwise_s: float) -> float:
    """The seconds of a setting such as "30 sec"."""
    number = re.match(r"\d+", value)
    return float(number.group()) if number else otherwise_s
