"""Which processes belong to a cluster: by start time, by environment and by namespace."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm.testbed.errors import ClusterError
from slurm.testbed.settings import MARKER, Place, write_whole

PROC = Path("/proc")


def started_ticks(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the process's start; None when it is gone or dead
    and only waits for its parent."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def children(pid: int) -> list[int]:
    found = ((child, _stat(child)) for child in all_pids())
    return [child for child, fields in found if fields is not None and int(fields[1]) == pid]


def all_pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """What /proc says after the command's name: state, parent, ...; None for the dead."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def namespaces(pid: int) -> set[str]:
    """Such as {"net:[4026532008]", ...}; empty for a process that is gone."""
    found = set()
    for kind in ("net", "uts", "ipc", "mnt", "pid"):
        with suppress(OSError):
            found.add(os.readlink(PROC / str(pid) / "ns" / kind))
    return found


def is_marked(pid: int, place: Place) -> bool:
    """Whether the process was started with the cluster's mark in its environment."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{MARKER}={place.root}".encode() in environment.split(b"\0")


def describe(pid: int) -> str:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        command = b""
    return f"process {pid} ({command.replace(bytes(1), b' ').decode(errors='replace')[:120]})"


@dataclass(frozen=True)
class Holder:
    """The process that keeps a host's namespaces: `ctl`, or pid 1 of a node."""

    host: str
    pid: int
    ticks: int
    namespaces: tuple[str, ...]

    @classmethod
    def of(cls, host: str, pid: int) -> Holder:
        """What it holds and nobody else has, as things are now."""
        ticks = started_ticks(pid)
        own = namespaces(pid) - namespaces(os.getpid())
        if ticks is None or not own:
            raise ClusterError(f"{host}: process {pid} ended while the host was being made")
        return cls(host, pid, ticks, tuple(sorted(own)))

    def alive(self) -> bool:
        return started_ticks(self.pid) == self.ticks

    def kill(self) -> None:
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def save(self, place: Place) -> None:
        write_whole(place.records / f"{self.host}.json", json.dumps(asdict(self)) + "\n")


def load_holder(place: Place, host: str) -> Holder | None:
    """The living holder of a host; None when the host is down."""
    try:
        values = json.loads((place.records / f"{host}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    holder = Holder(**{**values, "namespaces": tuple(values["namespaces"])})
    return holder if holder.alive() else None


def known_namespaces(place: Place) -> set[str]:
    """Those recorded ones in which a marked process lives.

    Numbers of dead namespaces are given out again, maybe to another cluster's.
    """
    recorded: set[str] = set()
    for path in place.records.glob("*.json"):
        recorded.update(json.loads(path.read_text(encoding="utf-8"))["namespaces"])
    held: set[str] = set()
    for pid in all_pids():
        if is_marked(pid, place):
            held |= namespaces(pid)
    return (recorded & held) - namespaces(os.getpid())


def inhabitants(among: set[str]) -> list[int]:
    """All living processes in one of the namespaces `among`."""
    return [
        pid
        for pid in all_pids()
        if not among.isdisjoint(namespaces(pid)) and started_ticks(pid) is not None
    ]


def members(place: Place, among: set[str]) -> list[int]:
    """All living processes with the cluster's mark or in one of the namespaces `among`."""
    marked = [pid for pid in all_pids() if is_marked(pid, place)]
    found = {*marked, *inhabitants(among)} - {os.getpid()}
    return sorted(pid for pid in found if started_ticks(pid) is not None)
