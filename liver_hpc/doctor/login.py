"""Checks that need no node: this host, and what the controller says of the cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.replies import PartitionInfo, parse_setting_s
from liver_hpc.doctor.findings import Check, Result, failed, passed, skipped, warned
from liver_hpc.doctor.order import Order
from liver_hpc.errors import ConfigError, LiverError

COMMANDS = ("sbatch", "srun", "salloc", "scancel", "scontrol", "squeue", "sinfo")
LEAST_FREE_BYTES = 2**30
LEAST_FREE_INODES = 10_000

_COMMAND_S = 20.0
_AUTHENTICATION = re.compile(r"munge|credential|authenticat", re.I)
_HINT = "If munged is up"
_DROPPED = "Zero Bytes"
_SLURM_CONF = "/etc/slurm/slurm.conf"
_DEFAULT_KILL_WAIT_S = 30.0


@dataclass
class Login:
    """What the checks of a login node work with."""

    order: Order
    commands: SlurmCommands = field(
        default_factory=lambda: SlurmCommands(command_s=_COMMAND_S, unreachable_s=0.0)
    )

    @cached_property
    def complaint(self) -> str:
        """What the controller, or the way to it, says to a plain question; empty for none."""
        try:
            self.commands.setting("SLURM_VERSION", retry=False)
        except SlurmError as error:
            return error.complaint or str(error)
        return ""

    @cached_property
    def partitions(self) -> dict[str, PartitionInfo]:
        return self.commands.partitions(retry=False)

    @property
    def runs_directory(self) -> Path:
        return self.order.runs_directory.absolute()


def _commands(login: Login) -> Result:
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return failed(
            f"not on the path: {', '.join(missing)}",
            "load the site's Slurm module, or run this where jobs are submitted from",
        )
    version = _run(["srun", "--version"]).strip()
    return passed(f"{version} in {Path(str(shutil.which('srun'))).parent}")


def _munge(login: Login) -> Result:
    complaint = login.complaint
    if not complaint:
        kind = login.commands.setting("AuthType", retry=False)
        return passed(f"the controller takes this host's credentials ({kind})")
    advice = "start munged here and on the controller, with the same key and the right time"
    for line in complaint.splitlines():
        if _AUTHENTICATION.search(line) and _HINT not in line:
            return failed(line, advice)
    if shutil.which("munge") is None:
        return skipped("munge is not on the path, and the controller does not answer")
    try:
        decoded = _run(["unmunge", *_munge_socket()], _run(["munge", "-n", *_munge_socket()]))
    except LiverError as error:
        return failed(str(error), advice)
    if _DROPPED in complaint:
        return failed(f"munge works here, but the controller hangs up: {complaint}", advice)
    return passed(f"munge and unmunge agree: {decoded.splitlines()[0].strip()}")


def _munge_socket() -> list[str]:
    """The option that names the socket that Slurm uses, where its configuration names one."""
    try:
        text = Path(os.environ.get("SLURM_CONF", _SLURM_CONF)).read_text(encoding="utf-8")
    except OSError:
        return []
    named = re.search(r"^\s*AuthInfo\s*=.*?\bsocket=([^,\s]+)", text, re.M | re.I)
    return [f"--socket={named[1]}"] if named else []


def _controller(login: Login) -> Result:
    if login.complaint:
        return failed(login.complaint, "ask for slurmctld; `scontrol ping` says where it should be")
    cluster = login.commands.setting("ClusterName", retry=False)
    version = login.commands.setting("SLURM_VERSION", retry=False)
    return passed(f"cluster {cluster} answers, Slurm {version}")


def _partitions(login: Login) -> Result:
    held = login.partitions
    listed = ", ".join(
        f"{p.name} (preempt mode {p.preempt_mode}, grace {p.grace_s:g} s)" for p in held.values()
    )
    missing = [name for name in login.order.partitions() if name not in held]
    if missing:
        return failed(
            f"no partition {', '.join(map(repr, missing))}; there are {listed or 'none'}",
            "correct the run file's cluster.slurm, or --partition",
        )
    return passed(listed)


def _preemption(login: Login) -> Result:
    """Whether what is meant to be preempted is, and with time enough to leave."""
    order, held = login.order, login.partitions
    burst = order.cluster.slurm.burst
    name = burst.partition if burst else order.partition
    problems = list(_het_problems(login))
    if name is not None:
        problems += _burst_problems(held[name], needed_s(login.runs_directory))
    if problems:
        return warned("; ".join(found for found, _ in problems), problems[0][1])
    kind = login.commands.setting("PreemptType", retry=False)
    if name is None:
        return passed(f"{kind}; no burst partition is named")
    grace = f"{held[name].preempt_mode} with {held[name].grace_s:g} s of grace"
    return passed(f"{kind}; {name}: {grace}")


def _burst_problems(partition: PartitionInfo, need_s: float | None) -> list[tuple[str, str]]:
    name, grace_s = partition.name, partition.grace_s
    if partition.preempt_mode == "OFF":
        return [
            (
                f"jobs in {name} are never preempted (PreemptMode OFF)",
                f"nothing, or take a partition for burst nodes that can be preempted; {name} works",
            )
        ]
    if grace_s <= 0:
        return [
            (
                f"{name} gives no grace time: its nodes are lost without a warning",
                "ask for GraceTime on it; until then a preemption ends in the last resort",
            )
        ]
    if need_s is not None and grace_s < need_s:
        return [
            (
                f"{name} gives {grace_s:g} s of grace, the slowest handoff measured took "
                f"{need_s:.1f} s",
                "ask for a longer GraceTime, or for layouts that move less",
            )
        ]
    return []


def _het_problems(login: Login) -> Iterator[tuple[str, str]]:
    """Slurm preempts a het job only when every component may be."""
    modes = {}
    for component in login.order.cluster.slurm.components:
        if component.partition is not None:
            modes[component.name] = login.partitions[component.partition].preempt_mode
    shielding = sorted(name for name, mode in modes.items() if mode == "OFF")
    shielded = sorted(modes.keys() - set(shielding))
    if shielding and shielded:
        yield (
            f"components {', '.join(shielded)} are never preempted: {', '.join(shielding)} of the "
            "same job cannot be",
            "move what is to be preempted to cluster.slurm.burst, a job of its own",
        )


def needed_s(runs_directory: Path) -> float | None:
    """Notice to release of the slowest handoff in the newest run here; None when none is known."""
    from liver_hpc.report.store import read_run

    try:
        records = read_run(runs_directory / "latest" / "metrics.h5")
    except (ConfigError, OSError):
        return None
    took_s = [
        record.released_s - record.notice_s
        for record in records.reconfigurations
        if record.outcome == "completed"
    ]
    return max(took_s, default=None)


def _kill_wait(login: Login) -> Result:
    shown, exit_s = login.commands.setting("KillWait", retry=False), login.order.exit_s
    kill_wait_s = parse_setting_s(shown, _DEFAULT_KILL_WAIT_S)
    if kill_wait_s < exit_s:
        return warned(
            f"{kill_wait_s:g} s from SIGTERM to SIGKILL, less than deadlines.exit_s ({exit_s:g} s)",
            f"set deadlines.exit_s below {kill_wait_s:g}, or have KillWait raised",
        )
    return passed(f"{kill_wait_s:g} s from SIGTERM to SIGKILL")


def _runs_directory(login: Login) -> Result:
    directory = login.runs_directory
    there = _nearest(directory)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failed(f"{there} cannot be written to", "name another by --runs-directory")
    return passed(str(directory) if there == directory else f"{directory}, which can be made")


def _nearest(directory: Path) -> Path:
    """A directory, or what there is on the way to it."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _space(login: Login) -> Result:
    status = os.statvfs(_nearest(login.runs_directory))
    free_bytes, free_inodes = status.f_bavail * status.f_frsize, status.f_favail
    found = f"{free_bytes / 2**30:.1f} GiB free"
    if status.f_files:
        found += f", {free_inodes} inodes"
    if free_bytes < LEAST_FREE_BYTES or (status.f_files and free_inodes < LEAST_FREE_INODES):
        return warned(found, "make room: metrics pause and checkpoints fail on a full disk")
    return passed(found)


def _run(words: list[str], given: str = "") -> str:
    """What a command prints; LiverError with its complaint when it fails."""
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=_COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise LiverError(f"waited {_COMMAND_S:g} s for {words[0]}") from None
    except OSError as error:
        raise LiverError(f"{words[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise LiverError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


_ASK = "ask the cluster's staff; this is Slurm's own word"

LOGIN_CHECKS = (
    Check("commands", _commands),
    Check("munge", _munge, ("commands",)),
    Check("controller", _controller, ("munge",)),
    Check("partitions", _partitions, ("controller",), _ASK),
    Check("preemption", _preemption, ("partitions",), _ASK),
    Check("kill wait", _kill_wait, ("controller",), _ASK),
    Check("run directory", _runs_directory),
    Check("space", _space, ("run directory",)),
)
