"""`python -m liver_hpc.doctor.probe DIRECTORY NETWORK`: looks at its node, and from it at another.

`liver doctor` starts one on every node. Each line of its input is a request: {"number", "nodes",
"probe", "with"}, the last its arguments. The nodes that are named, or all, answer with one line
{"number", "node"} and what they found, or "error". Each request has a thread of its own, so that
one that hangs holds up no other. What a probe opens for others stays open until the input ends.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

from liver_hpc.cluster.network import (
    NCCL_LOG,
    NodeFacts,
    control_interface,
    node_facts,
    worker_network_environment,
)
from liver_hpc.config.schema import NetworkSection
from liver_hpc.doctor.checks import Result, failed, passed, warned
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.recipes.specs import NOT_INSTALLED, versions_of

PACKAGES = ("liver_hpc", "torch", "megatron-core", "mpi4py")
ASKERS_TOKEN = "asker"
BULK_BYTES = 64 * 2**20
WARM_UP_BYTES = 2**20

ANSWER = "liver doctor: "
"""What a line begins with that is an answer; sites' profiles print others."""

WORKER_THREADS = 128
"""Of a worker on a GPU with the communicators of two worlds: assumed, not measured. One on a CPU
was seen with seven."""
NODE_THREADS = 128
"""Of what is beside workers on a node, where the coordinator may be, too."""
CGROUPS = Path("/sys/fs/cgroup")

Said = dict[str, Any]
"""What a probe found, as JSON."""


class Bound(NamedTuple):
    """How many threads there may be, and are."""

    name: str
    limit: int
    used: int


@dataclass
class Node:
    """What probes work with. directory: the doctor's own, in the runs directory."""

    name: str
    directory: Path
    network: NetworkSection
    held: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def facts(self) -> NodeFacts:
        return node_facts()

    @property
    def interface(self) -> str:
        """That of control traffic; ConfigError where there is none."""
        return control_interface(self.network, "slurm", self.facts) or "lo"

    @property
    def address(self) -> str:
        return self.facts.interfaces[self.interface]


# ---- the node itself


def versions() -> dict[str, str]:
    """Of Python and of what has to be the same everywhere."""
    return {"Python": platform.python_version(), **versions_of(PACKAGES)}


def same_versions(node: Node, wanted: dict[str, str]) -> Result:
    """wanted: of the asking host, those that have to be the same here."""
    own = versions()
    wrong = [
        f"{package} is {version}, there {wanted.get(package, NOT_INSTALLED)}"
        for package, version in own.items()
        if version == NOT_INSTALLED or version != wanted.get(package, version)
    ]
    if not wrong:
        listed = ", ".join(f"{package} {version}" for package, version in own.items())
        return passed(f"{listed}; as on the asking host: {', '.join(wanted)}")
    advice = (
        "use one environment with all of it on a file system that all nodes share, or one image"
    )
    return failed(f"not as on the asking host: {'; '.join(wrong)}", advice)


def locked_memory(node: Node) -> Result:
    if not node.facts.hca_ports:
        return passed("no RDMA adapters, which need it")
    ports = ", ".join(f"{port}/{port.link_layer}" for port in node.facts.hca_ports)
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return warned(
            f"locked memory is limited beside the adapters {ports}",
            "`ulimit -l unlimited` in cluster.slurm.setup, or in slurm.conf "
            "PropagateResourceLimitsExcept=MEMLOCK: NCCL over InfiniBand needs it",
        )
    return passed(f"unlimited beside the adapters {ports}")


def threads(node: Node, workers: int) -> Result:
    """workers: as many as the run file has on one node."""
    wanted = NODE_THREADS + workers * WORKER_THREADS
    bounds = sorted(thread_bounds(), key=lambda bound: bound.limit - bound.used)
    if not bounds:
        return passed(f"{wanted} are wanted, and no limit is set")
    name, limit, used = bounds[0]
    if limit - used < wanted:
        return warned(
            f"{workers} workers and what is beside them may have {wanted} threads; {name} lets "
            f"this user have {limit}, and {used} are there",
            "have it raised (limits.conf, LimitNPROC and TasksMax of slurmd)",
        )
    return passed(f"{wanted} are wanted, {name} is {limit}")


def thread_bounds() -> Iterator[Bound]:
    """On this node: that of the user, but for root, and those of the cgroups around this process,
    which the processes of a run are in, too."""
    own, limit = os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if own and limit != resource.RLIM_INFINITY:
        found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
        used = [
            each["num_threads"] or 0 for each in found if each["uids"] and each["uids"][0] == own
        ]
        yield Bound("ulimit -Hu", limit, sum(used))
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        root = CGROUPS / "pids" if controllers else CGROUPS
        around = root / path.lstrip("/")
        for group in [around, *around.parents][: -len(root.parents)]:
            with suppress(OSError, ValueError):  # it has no such limit: "max"
                limit = int((group / "pids.max").read_text(encoding="ascii"))
                used_in = int((group / "pids.current").read_text(encoding="ascii"))
                yield Bound(f"{group}/pids.max", limit, used_in)


def interfaces(node: Node) -> Result:
    try:
        return passed(f"control traffic by {node.interface} {node.address}")
    except ConfigError as error:
        return failed(str(error), "name the interface in network.interface")


def shared(node: Node, token: str) -> Result:
    """Reads what the asker wrote, and writes it down again under this node's name."""
    try:
        read = (node.directory / ASKERS_TOKEN).read_text(encoding="ascii")
        (node.directory / node.name).write_text(token, encoding="ascii")
    except OSError as error:
        read = f"{error.filename}: {error.strerror}"
    if read == token:
        return passed("what one host writes the others read")
    there = f"{node.directory.parent} as the asking host has it is not there"
    return failed(f"{there} ({read})", "put it on a file system that all nodes mount")


def lock(node: Node) -> Said:
    """Takes the lock that all ask for, and keeps it. Raises OSError where there are none."""
    stream = node.held.enter_context((node.directory / "lock").open("ab"))
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return {"taken": False}
    return {"taken": True}


# ---- two nodes


def rendezvous(node: Node) -> Said:
    """Opens one as a coordinator has it."""
    from liver_hpc.rendezvous.base import Answer
    from liver_hpc.rendezvous.mpi.network import MpiNetwork, RendezvousPlace
    from liver_hpc.rendezvous.mpi.service import MpiRendezvous
    from liver_hpc.run.secret import read_secret

    place = MpiNetwork(node.address, node.network.interface, node.network.mpi_netmod)
    opened = MpiRendezvous(node.directory, read_secret(node.directory / "secret"), place)
    node.held.callback(opened.close)
    opened.start(lambda _: Answer(worker_ids=(0,), control_host=place.host, control_port=1))
    opened.check()
    listens = RendezvousPlace.read(node.directory)
    return {"host": place.host, "port": listens and listens.port}


def join(node: Node, within_s: float) -> Said:
    """Meets the rendezvous as an agent does; MeetingError when that fails."""
    from liver_hpc.rendezvous.base import Identity
    from liver_hpc.rendezvous.mpi.joiner import joiner_process, meet
    from liver_hpc.run.secret import read_secret

    identity = Identity(agent="doctor", host=node.facts.host, workers=1)
    began_s = time.monotonic()
    secret = read_secret(node.directory / "secret")
    meet(joiner_process(), node.directory, identity, secret, within_s, within_s)
    return {"took_s": time.monotonic() - began_s}


def store(node: Node, within_s: float) -> Said:
    """Opens one over which two nodes find each other; and whether there is a CUDA device. It asks
    nobody who he is, and would listen on all addresses."""
    import torch

    family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
    listening = socket.create_server((node.address, 0), family=family)
    opened = _store(
        node.address,
        listening.getsockname()[1],
        within_s,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    node.held.callback(lambda: opened)
    return {"at": [node.address, opened.port], "cuda": torch.cuda.is_available()}


def measure(node: Node, rank_0: str, backend: str, at: tuple[str, int], within_s: float) -> Said:
    """Bandwidth from `rank_0` to the other node, and by which transport."""
    import torch

    from liver_hpc.world.device import Device, open_device
    from liver_hpc.world.network import Network

    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        log = Path(directory) / "nccl.log"
        chosen = worker_network_environment(node.network, "slurm", node.facts, os.environ)
        os.environ.update({NCCL_LOG: str(log), **chosen})
        device = open_device(0) if backend == "nccl" else Device(torch.device("cpu"))
        network = Network(device, node.address)
        rank, met = int(node.name != rank_0), _store(*at, within_s)
        opened = network.open_backend(met, rank, 2, within_s)

        def exchange_s(tensor: torch.Tensor) -> float:
            """Seconds for a tensor to go there, and one byte of it to come back."""
            began_s = time.monotonic()
            for one, sender in ((tensor, 0), (tensor[:1], 1)):
                (opened.send if rank == sender else opened.recv)([one], 1 - rank, 0).wait()
            device.synchronize()
            return time.monotonic() - began_s

        bulk = torch.zeros(BULK_BYTES, device=device.torch_device, dtype=torch.uint8)
        exchange_s(bulk[:WARM_UP_BYTES])
        bulk_s = exchange_s(bulk)
        transport = network.transports([opened])
    return {
        "megabytes_per_s": BULK_BYTES / bulk_s / 1e6,
        "transport": f"{', '.join(transport.kinds)} ({transport.detail}), not encrypted",
    }


def _store(host: str, port: int, limit_s: float, is_master: bool = False, **more: Any) -> Any:
    tcp_store: Any = importlib.import_module("torch.distributed").TCPStore
    return tcp_store(host, port, is_master=is_master, timeout=timedelta(seconds=limit_s), **more)


# ---- requests


def hello(node: Node) -> Said:
    return {"job": os.environ.get("SLURM_JOB_ID", "")}


def now(node: Node) -> Said:
    return {"s": time.time()}


_ALONE = (hello, now, same_versions, locked_memory, threads, interfaces, shared, lock)
_TOGETHER = (rendezvous, join, store, measure)
PROBES: dict[str, Callable[..., Result | Said]] = {
    probe.__name__: probe for probe in (*_ALONE, *_TOGETHER)
}


def serve(node: Node, request: Said) -> None:
    """Answers on standard output."""
    try:
        found = PROBES[request["probe"]](node, **request["with"])
        said = found if isinstance(found, dict) else asdict(found)
    except (LiverError, OSError, RuntimeError, ImportError) as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    answer = json.dumps({"number": request["number"], "node": node.name, **said})
    os.write(1, f"{ANSWER}{answer}\n".encode())  # whole, and at once


def main() -> NoReturn:
    """Serves until the input ends, which may also be that the doctor was killed."""
    directory, network = Path(sys.argv[1]), NetworkSection.model_validate_json(sys.argv[2])
    node = Node(os.environ["SLURMD_NODENAME"], directory, network)
    for line in sys.stdin:
        request = json.loads(line)
        if node.name in (request["nodes"] or [node.name]):
            threading.Thread(target=serve, args=(node, request), daemon=True).start()
    node.held.close()
    os._exit(0)  # native threads must not hold the step


if __name__ == "__main__":
    main()
