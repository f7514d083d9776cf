"""Checks that need nodes: each starts probes in an allocation and judges what they say."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.doctor import on_node
from liver_hpc.doctor.findings import Check, Result, failed, passed, skipped, warned
from liver_hpc.doctor.order import Order
from liver_hpc.doctor.steps import ProbeFailed, Said, Steps
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.run.secret import create_secret

LEAST_FILES = 4096
MOST_SKEW_S = 0.5
FACTS_S = 60.0
LOCK_S = 30.0
CLOCK_S = 30.0
MEET_S = 60.0
BYTES_S = 120.0

_SEEN_S = 15.0
_UNLIMITED = -1


@dataclass
class Nodes:
    """What the checks of nodes work with. directory: the doctor's own, in the runs directory,
    which is `made` where there was none.
    """

    order: Order
    steps: Steps
    directory: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    facts: list[Said] = field(default_factory=list)
    made: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.steps.allocation.nodes

    @property
    def network(self) -> list[str]:
        return ["--network", self.order.network.model_dump_json()]

    @property
    def place(self) -> list[str]:
        return ["--directory", str(self.directory)]

    def prepare(self) -> None:
        """Makes the directory, private, with a token and a secret in it."""
        try:
            self.made = not self.directory.parent.exists()
            self.directory.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise LiverError(f"{self.directory} cannot be made: {error.strerror}") from error
        (self.directory / on_node.ASKERS_TOKEN).write_text(self.token, encoding="ascii")
        create_secret(self.directory / "secret")

    def clear_up(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.made:
            with suppress(OSError):  # something else has come into it
                self.directory.parent.rmdir()


def _answers(nodes: Nodes) -> Result:
    """One step on all nodes, whose answers the next checks judge."""
    named = [word for name in nodes.names for word in ("--name", name)]
    arguments = [*nodes.place, *nodes.network, *named]
    deadline = Deadline.after(SystemClock(), FACTS_S, "all nodes")
    with nodes.steps.start("facts", nodes.names, arguments) as probe:
        while len(nodes.facts) < len(nodes.names):
            nodes.facts.append(probe.say(max(1.0, deadline.remaining_s())))
    hosts = ", ".join(sorted(fact["host"] for fact in nodes.facts))
    kind = "of its own" if nodes.steps.allocation.own else "around this process"
    return passed(f"job {nodes.steps.allocation.job} {kind}: {hosts} answer")


def _versions(nodes: Nodes) -> Result:
    known = {socket.gethostname(): on_node.versions()}
    known |= {fact["host"]: fact["versions"] for fact in nodes.facts}
    differing = []
    for package in ("Python", *on_node.PACKAGES):
        hosts: dict[str, list[str]] = {}
        for host, versions in known.items():
            hosts.setdefault(versions.get(package, "none"), []).append(host)
        if len(hosts) > 1:
            where = ", ".join(f"{version} on {' '.join(on)}" for version, on in hosts.items())
            differing.append(f"{package} is {where}")
    if differing:
        return failed(
            "; ".join(differing), "use one environment on a file system that all nodes share"
        )
    same = next(iter(known.values()))
    listed = ", ".join(f"{package} {version}" for package, version in same.items())
    missing = [package for package, version in same.items() if version == "none"]
    if missing:
        return failed(listed, f"install {' '.join(missing)}")
    return passed(f"the same on all: {listed}")


def _limits(nodes: Nodes) -> Result:
    few = {fact["host"]: fact["files"] for fact in nodes.facts if _below(fact["files"])}
    if few:
        listed = ", ".join(f"{files} on {host}" for host, files in few.items())
        return warned(
            f"open files: {listed}, wanted {LEAST_FILES}",
            "raise it in the setup lines (`ulimit -n`), or Slurm's PropagateResourceLimits",
        )
    locked = [
        fact["host"]
        for fact in nodes.facts
        if fact["hca_ports"] and fact["locked_bytes"] != _UNLIMITED
    ]
    if locked:
        return warned(
            f"locked memory is limited on {', '.join(locked)}, which have RDMA adapters",
            "have memlock made unlimited for slurmd (LimitMEMLOCK); NCCL over InfiniBand needs it",
        )
    least = min(fact["files"] for fact in nodes.facts)
    adapters = sorted({port for fact in nodes.facts for port in fact["hca_ports"]})
    ports = f"adapters {', '.join(adapters)}" if adapters else "no RDMA adapters"
    return passed(f"{'unlimited' if least == _UNLIMITED else least} open files; {ports}")


def _below(files: int) -> bool:
    return files != _UNLIMITED and files < LEAST_FILES


def _names(nodes: Nodes) -> Result:
    lost = [
        f"{fact['host']} does not know {name}"
        for fact in nodes.facts
        for name, address in fact["resolves"].items()
        if not address
    ]
    if lost:
        return failed("; ".join(lost), "have the nodes' names put into DNS or /etc/hosts")
    return passed(f"each of {', '.join(nodes.names)} resolves on all of them")


def _interfaces(nodes: Nodes) -> Result:
    troubles = [fact["trouble"] for fact in nodes.facts if fact["trouble"]]
    if troubles:
        return failed("; ".join(troubles), "name the interface in network.interface")
    each = [f"{fact['host']} {fact['interface']} {fact['address']}" for fact in nodes.facts]
    return passed(f"control traffic: {', '.join(each)}")


def _shared(nodes: Nodes) -> Result:
    parent, advice = nodes.directory.parent, "put it on a file system that all nodes mount"
    blind = {f["host"]: f["token_trouble"] for f in nodes.facts if f["token"] != nodes.token}
    if blind:
        told = next(iter(blind.values())) or "it is another directory there"
        return failed(
            f"{parent} as this host has it is not there on {', '.join(blind)} ({told})", advice
        )
    missing: list[str] = []

    def look() -> bool:
        missing[:] = [fact["host"] for fact in nodes.facts if not _echo(nodes, fact["host"])]
        return not missing

    try:
        poll_until(look, Deadline.after(SystemClock(), _SEEN_S, "the nodes' files"))
    except DeadlineError:
        return failed(
            f"{parent}: what {', '.join(missing)} wrote is not seen here after {_SEEN_S:g} s",
            advice,
        )
    return passed(f"{parent}: what one host writes the others read")


def _echo(nodes: Nodes, host: str) -> bool:
    try:
        return (nodes.directory / host).read_text(encoding="ascii") == nodes.token
    except OSError:
        return False


def _locking(nodes: Nodes) -> Result:
    holder, others = nodes.names[0], nodes.names[1:]
    free = []
    with nodes.steps.answering("hold-lock", holder, nodes.place, LOCK_S):
        if on_node.try_lock(nodes.directory):
            free.append(socket.gethostname())
        for other in others:
            with nodes.steps.start("try-lock", [other], nodes.place) as probe:
                if probe.say(LOCK_S)["free"]:
                    free.append(other)
    if free:
        return failed(
            f"a lock that {holder} holds is not respected on {', '.join(free)}",
            "mount it with locks (NFS: not `nolock` or `local_lock`; Lustre: `flock`)",
        )
    return passed(f"a lock that {holder} holds is respected elsewhere")


def _clocks(nodes: Nodes) -> Result:
    first, others = nodes.names[0], nodes.names[1:]
    with nodes.steps.answering("serve-clock", first, nodes.network, CLOCK_S) as (_, server):
        where = ["--host", server["host"], "--port", str(server["port"])]
        with nodes.steps.start("compare-clock", others, where) as probe:
            said = [probe.say(CLOCK_S) for _ in others]
    # The offset is certain to half of the round trip.
    beyond = [one for one in said if abs(one["ahead_s"]) - one["round_trip_s"] / 2 > MOST_SKEW_S]
    worst = max(said, key=lambda one: abs(one["ahead_s"]))
    found = (
        f"{worst['host']} is {1e3 * worst['ahead_s']:+.1f} ms from {first} "
        f"(round trip {1e3 * worst['round_trip_s']:.1f} ms)"
    )
    if beyond:
        return warned(found, "have chrony or ntpd started; times in the metrics are compared")
    return passed(found)


def _meeting(nodes: Nodes) -> Result:
    first, second = nodes.names[:2]
    arguments = [*nodes.place, "--limit-s", str(MEET_S / 2)]
    with (
        nodes.steps.answering("desk", first, [*nodes.place, *nodes.network], MEET_S) as (_, desk),
        nodes.steps.start("join", [second], arguments) as probe,
    ):
        said = probe.say(MEET_S)
    return passed(f"{second} met {first} ({desk['host']}) in {said['took_s']:.2f} s")


def _bandwidth(backend: str) -> Callable[[Nodes], Result]:
    def look(nodes: Nodes) -> Result:
        first, second = nodes.names[:2]
        words = [*nodes.network, "--backend", backend, "--limit-s", str(BYTES_S / 2)]
        with nodes.steps.answering("bytes", first, words, BYTES_S) as (_, server):
            if not server["cuda"]:
                return skipped(f"not applicable: no CUDA device on {first}")
            where = ["--host", server["host"], "--port", str(server["port"])]
            with nodes.steps.start("bytes", [second], [*words, *where]) as probe:
                said = probe.say(BYTES_S)
        if "cuda" in said:
            raise ProbeFailed(f"{first} has a CUDA device, {second} has none")
        return passed(
            f"{said['megabytes_per_s']:.0f} MB/s, {1e6 * said['latency_s']:.0f} us from {first} "
            f"to {second} by {', '.join(said['kinds'])} ({said['detail']})"
        )

    return look


_LINK = "see that nodes reach each other on the interface above; name another in network"
_START = "see that `srun` starts this Python there; name another in cluster.slurm.python"

NODE_CHECKS = (
    Check("nodes", _answers, (), _START),
    Check("versions", _versions, ("nodes",)),
    Check("limits", _limits, ("nodes",)),
    Check("names", _names, ("nodes",)),
    Check("interfaces", _interfaces, ("nodes",)),
    Check("shared directory", _shared, ("nodes",)),
    Check("locking", _locking, ("shared directory",), "see how the runs directory is mounted"),
)
PAIR_CHECKS = (
    Check("clocks", _clocks, ("interfaces",), _LINK),
    Check("mpi meeting", _meeting, ("interfaces", "shared directory"), _LINK),
    Check("gloo", _bandwidth("gloo"), ("interfaces",), _LINK),
    Check("nccl", _bandwidth("nccl"), ("interfaces",), _LINK),
)
