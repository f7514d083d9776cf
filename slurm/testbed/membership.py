"""Which processes belong to a cluster: by start time, by environment and by namespace."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from liver_hpc.host.files import write_whole
from slurm.testbed.settings import MARKER, ClusterError, Place

PROC = Path("/proc")
KINDS = ("net", "uts", "ipc", "mnt", "pid")


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
    for kind in KINDS:
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


class Kept:
    """Namespaces that last as long as this is open, whether or not anybody lives in them.

    The kernel gives the number of a namespace that has ended to the next one that is made, maybe
    another cluster's: who kills by number keeps the namespace meanwhile.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    @property
    def names(self) -> set[str]:
        """Such as {"net:[4026532008]", ...}."""
        return set(self._descriptors)

    def keep(self, pid: int, among: Container[str] | None = None) -> None:
        """Those of a process that this one does not share; only such as are `among`."""
        own = namespaces(os.getpid())
        for kind in KINDS:
            with suppress(OSError):  # the process is gone
                descriptor = os.open(PROC / str(pid) / "ns" / kind, os.O_RDONLY)
                name = os.readlink(PROC / "self" / "fd" / str(descriptor))
                if name in own or name in self._descriptors or not (among is None or name in among):
                    os.close(descriptor)
                else:
                    self._descriptors[name] = descriptor

    def keep_recorded(self, place: Place) -> None:
        """A cluster's recorded ones in which a marked process lives: numbers of those that have
        ended may be another cluster's."""
        recorded: set[str] = set()
        for path in place.records.glob("*.json"):
            recorded.update(json.loads(path.read_text(encoding="utf-8"))["namespaces"])
        for pid in all_pids():
            if is_marked(pid, place):
                self.keep(pid, recorded)


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
