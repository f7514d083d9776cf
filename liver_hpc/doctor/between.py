"""What two nodes find out about each other: clocks, a meeting over MPI, bytes by gloo and NCCL."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liver_hpc.cluster.network import (
    GLOO_INTERFACE,
    NCCL_LOG,
    control_interface,
    node_facts,
    worker_network_environment,
)
from liver_hpc.config.schema import NetworkSection
from liver_hpc.doctor.on_node import Say
from liver_hpc.errors import DeadlineError, MeetingError
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.mpi.joiner_process import JoinerProcess
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
from liver_hpc.run.secret import read_secret

if TYPE_CHECKING:
    from liver_hpc.world.device import Device, Network

CLOCK_ROUNDS = 16
BULK_BYTES = 64 * 2**20
WARM_UP_BYTES = 2**20
LATENCY_ROUNDS = 50

_LINE_BYTES = 64


def own_address(network: NetworkSection) -> str:
    """The address of the interface for control traffic; ConfigError where there is none."""
    facts = node_facts()
    interface = control_interface(network, "slurm", facts)
    return facts.interfaces[interface or "lo"]


# ---- clocks


def serve_clock(say: Say, network: NetworkSection) -> None:
    """Answers every line with this node's time until SIGTERM."""
    with socket.create_server((own_address(network), 0)) as server:
        host, port = server.getsockname()[:2]
        threading.Thread(target=_answer_all, args=(server,), daemon=True).start()
        say(host=host, port=port)
        signal.sigwait({signal.SIGTERM})


def _answer_all(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer_times, args=(connection,), daemon=True).start()


def _answer_times(connection: socket.socket) -> None:
    with connection:
        while connection.recv(_LINE_BYTES):
            connection.sendall(f"{time.time()!r}\n".encode())


def compare_clock(say: Say, host: str, port: int, limit_s: float) -> None:
    """How far this node's clock is ahead of the server's, and within which round trip."""
    with socket.create_connection((host, port), limit_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trip_s, ahead_s = min(_exchanges(connection))
    say(host=socket.gethostname(), ahead_s=ahead_s, round_trip_s=round_trip_s)


def _exchanges(connection: socket.socket) -> Iterator[tuple[float, float]]:
    """Round trip and offset of each exchange; the server's time counts for the middle of it."""
    for _ in range(CLOCK_ROUNDS):
        before_s, began_s = time.time(), time.monotonic()
        connection.sendall(b"?\n")
        theirs_s = float(connection.recv(_LINE_BYTES))
        round_trip_s = time.monotonic() - began_s
        yield round_trip_s, before_s + round_trip_s / 2 - theirs_s


# ---- the meeting


def open_desk(say: Say, directory: Path, network: NetworkSection) -> None:
    """A rendezvous as a coordinator has it, until SIGTERM."""
    place = MpiNetwork(own_address(network), network.interface, network.mpi_netmod)
    desk = MpiRendezvous(directory, read_secret(directory / "secret"), place)
    try:
        desk.start(
            lambda identity: Answer(worker_ids=(0,), control_host=place.host, control_port=1)
        )
        say(host=place.host)
        signal.sigwait({signal.SIGTERM})
    finally:
        desk.close()


def join_desk(say: Say, directory: Path, limit_s: float) -> None:
    """Meets the desk as an agent does; MeetingError when that fails."""
    identity = Identity(agent="doctor", host=socket.gethostname(), pid=os.getpid(), workers=1)
    began_s = time.monotonic()
    joiner = JoinerProcess(directory, identity, limit_s)
    try:
        if not select.select([joiner.end], [], [], limit_s + 5.0)[0]:
            raise DeadlineError(f"waited {limit_s:g} s for the joiner on {identity.host}")
        if joiner.answer() is None:
            raise MeetingError("the joiner has ended and has not")
    finally:
        joiner.close()
    say(host=identity.host, took_s=time.monotonic() - began_s)


# ---- bytes


@dataclass(frozen=True)
class Pair:
    """One end of a group of two. store: where the other end's store listens; None: serve it."""

    rank: int
    backend: str
    store: tuple[str, int] | None
    limit_s: float


def measure(say: Say, pair: Pair, network: NetworkSection) -> None:
    """Bandwidth and latency from rank 0 to rank 1, and by which transport; rank 1 tells them.

    Rank 0 first says where its store is. "nccl" without CUDA here says `cuda` is 0 and no more.
    """
    directory = tempfile.TemporaryDirectory(prefix="doctor-")
    with directory as place:
        facts = node_facts()
        chosen = worker_network_environment(network, "slurm", facts, os.environ)
        os.environ.update({NCCL_LOG: str(Path(place) / "nccl.log"), **chosen})
        import torch

        if pair.backend == "nccl" and not torch.cuda.is_available():
            say(host=facts.host, cuda=0)
            return
        _Exchange(say, pair, own_address(network), Path(place) / "nccl.log").run()


class _Exchange:
    """The measurement, once it is known that there is something to measure."""

    def __init__(self, say: Say, pair: Pair, address: str, log: Path) -> None:
        self._say = say
        self._pair = pair
        self._address = address
        self._log = log

    def run(self) -> None:
        import torch

        device = self._device()
        network = self._network(device)
        # Kept: the group's connections live no longer than the store.
        store = self._store()
        backend = network.open_backend(store, self._pair.rank, 2, self._pair.limit_s)
        bulk = torch.zeros(BULK_BYTES, device=device.torch_device, dtype=torch.uint8)
        self._transfer(backend, bulk[:WARM_UP_BYTES], device)
        bulk_s = self._transfer(backend, bulk, device)
        latency_s = statistics.median(
            self._transfer(backend, bulk[:1], device) / 2 for _ in range(LATENCY_ROUNDS)
        )
        chosen = network.transports([backend])
        self._say(
            host=socket.gethostname(),
            megabytes_per_s=BULK_BYTES / bulk_s / 1e6,
            latency_s=latency_s,
            kinds=list(chosen.kinds),
            detail=chosen.detail,
        )

    def _device(self) -> Device:
        import torch

        from liver_hpc.world.device import Device, open_device

        if self._pair.backend == "nccl":
            return open_device(0)
        return Device(torch.device("cpu"), "gloo")

    def _network(self, device: Device) -> Network:
        from liver_hpc.world.device import Network, NetworkPlan

        names = os.environ.get(GLOO_INTERFACE, "")
        interfaces = tuple(name.strip() for name in names.split(",") if name.strip())
        return Network(device, NetworkPlan(self._address, interfaces, self._log))

    def _store(self) -> Any:
        tcp_store: Any = importlib.import_module("torch.distributed").TCPStore
        timeout = timedelta(seconds=self._pair.limit_s)
        if self._pair.store is not None:
            return tcp_store(*self._pair.store, is_master=False, timeout=timeout)
        store = tcp_store(self._address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._say(host=self._address, port=store.port, cuda=1)
        return store

    def _transfer(self, backend: Any, tensor: Any, device: Device) -> float:
        """Seconds for a tensor to go from rank 0 to rank 1, and one byte of it to come back."""
        peer, began_s = 1 - self._pair.rank, time.monotonic()
        if self._pair.rank == 0:
            backend.send([tensor], peer, 0).wait()
            backend.recv([tensor[:1]], peer, 0).wait()
        else:
            backend.recv([tensor], peer, 0).wait()
            backend.send([tensor[:1]], peer, 0).wait()
        device.synchronize()
        return time.monotonic() - began_s
