"""How a worker's process groups come to be: their backends, NCCL's or gloo's, and over which
transport each goes."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.network import GLOO_INTERFACE, NCCL_LOG, is_own_nccl_log
from liver_hpc.errors import LiverError
from liver_hpc.host.interfaces import interface_addresses, interface_holding
from liver_hpc.host.process import quiet_thread
from liver_hpc.transport import gloo_sockets
from liver_hpc.transport.nccl_log import Chosen, NcclLog
from liver_hpc.transport.streams import streams_of
from liver_hpc.world.device import Device

T = TypeVar("T")

_LOOK_S = 0.05
NCCL_LOG_BYTES = 4 * 2**20
"""So much that was read is left in a log of NCCL."""
_INIT_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""The seconds after which torch gives up a communicator that does not come to be, a launch that the
device has no room for, and one whose communicator was aborted meanwhile, which it does not see. It
reads them once."""


def _meet(store: Any, size: int, deadline: Deadline) -> None:
    """Returns once all members have come. Who waits here is freed as the store is closed; who waits
    for NCCL to connect, as long as a peer does not come, by nothing but torch's own deadline."""
    if store.add("came", 1) == size:
        store.set("all came", "yes")
    store.wait(["all came"], timedelta(seconds=deadline.remaining_s()))


def _in_a_thread(work: Callable[[], T], look: Callable[[], None] = lambda: None) -> T:
    """What `work`, in a thread of its own, gives or raises. look: called meanwhile; where it raises
    the thread is left to end by itself."""
    gave: list[T] = []
    failed: list[BaseException] = []
    left = threading.Event()

    def run() -> None:
        try:
            gave.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            if not left.is_set():  # else its traceback would keep what it connected with
                failed.append(error)

    thread = quiet_thread(run, "connect")
    thread.join(_LOOK_S)
    try:
        while thread.is_alive():
            look()
            thread.join(_LOOK_S)
    except BaseException:
        left.set()
        raise
    if failed:
        raise failed.pop()
    return gave.pop()


class Network:
    """Opens group backends, and knows which transport each of them uses.

    The environment names the interfaces that gloo uses, else it uses that of the address
    `hostname`; and the file into which NCCL logs. A group has one gloo device an interface, with a
    thread and a listening socket.
    """

    def __init__(self, device: Device, hostname: str) -> None:
        self._device = device
        self._hostname = hostname
        names = (name.strip() for name in os.environ.get(GLOO_INTERFACE, "").split(","))
        self._interfaces = [name for name in names if name]
        self._log_path = os.environ.get(NCCL_LOG)
        self._log = NcclLog()
        self._log_begin = self._log_offset = 0
        self._chosen: WeakKeyDictionary[Any, Chosen] = WeakKeyDictionary()
        self._streams = streams_of(device.torch_device)

    def on_host(self) -> Network:
        """The same for what lies in host memory, whatever the device."""
        return Network(Device(torch.device("cpu")), self._hostname)

    def _new_gloo_devices(self) -> list[Any]:
        create = dist.ProcessGroupGloo.create_device
        named = [create(interface=name, lazy_init=False) for name in self._interfaces]
        return named or [create(hostname=self._hostname, lazy_init=False)]

    def open_backend(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        peers: str = "its members",
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """Connects one group's members over `store` and returns the c10d backend.

        Collective over the members: blocks until all have come or the deadline passes. peers: how
        an error names them. check: called while they connect; it may raise. gloo's members prove
        their connections to each other (`gloo_sockets`); TransferError where one is no member's.
        """
        timeout = timedelta(seconds=timeout_s)
        backend: Any
        if self._device.backend_name == "nccl":
            deadline = Deadline.after(SystemClock(), timeout_s, f"{peers} to connect")
            os.environ.setdefault(_INIT_LIMIT, str(math.ceil(timeout_s)))
            backend = self._new_nccl(store, rank, size, timeout)
            try:
                _meet(store, size, deadline)
                self._streams.take(backend, self._streams.make_room())  # others may have come first
                self._connect(backend, deadline, check)
            except BaseException as error:
                backend.abort()  # the device must not go on waiting for its peers
                if isinstance(error, RuntimeError | LiverError) and deadline.expired():
                    raise deadline.error() from error  # which says of whom
                raise
            chosen = self._log.read(self._newly_logged())
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            watch = gloo_sockets.Watch()
            options._devices = watch.listen(self._new_gloo_devices)
            limit = Deadline.after(SystemClock(), timeout_s, f"{peers} to connect")

            def look() -> None:
                check()
                limit.check()

            try:
                backend = _in_a_thread(partial(gloo, store, rank, size, options), look)
            except BaseException:
                watch.end_waiting(size)
                raise
            watch.prove(backend, store, rank, size, timeout, check)
            chosen = Chosen(("gloo tcp",), self._gloo_way())
        self._chosen[backend] = chosen
        return backend

    def _new_nccl(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A backend that is not connected yet."""
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        options.config.blocking = 0  # torch polls the communicator until `_INIT_LIMIT`
        # Another priority has other streams: those of communicators are not to be lanes'.
        options.is_high_priority_stream = True
        return nccl(store, rank, size, options)

    def _connect(self, backend: Any, deadline: Deadline, check: Callable[[], None]) -> None:
        """NCCL connects at the first collective, for which the store must still be there. It runs
        in a lane of its own: in training's, it would have to come at the same place between
        training's collectives on every worker. And in a thread of its own: a batch of messages
        whose end has failed counts as open in its thread for ever, and torch ends what is open
        before it connects, which NCCL then refuses."""
        lane = self._device.new_lane()

        def reduce() -> None:
            self._device.enter()
            with lane.entered():
                backend.allreduce([torch.zeros(1, device=self._device.torch_device)]).wait()

        _in_a_thread(reduce)
        lane.finish(deadline, check)

    def transports(self, backends: Iterable[Any]) -> Chosen:
        """The transports that these backends use.

        NCCL's are read from its log; where that tells nothing, the answer is "nccl".
        """
        found = [self._chosen[backend] for backend in backends if backend in self._chosen]
        kinds = {kind for chosen in found for kind in chosen.kinds}
        if found and not kinds:
            return Chosen(("nccl",), "NCCL's log does not tell: NCCL_DEBUG is not INFO")
        details = dict.fromkeys(chosen.detail for chosen in found if chosen.detail)
        return Chosen(tuple(sorted(kinds)), "; ".join(details))

    def _gloo_way(self) -> str:
        """The interfaces that gloo uses, with their addresses: "eth0/10.0.0.7"."""
        held = interface_addresses()
        if self._interfaces:
            return ",".join(f"{name}/{held.get(name, '?')}" for name in self._interfaces)
        return f"{interface_holding(self._hostname, held) or '?'}/{self._hostname}"

    def _newly_logged(self) -> str:
        """What NCCL has logged since the last call.

        A log of the run's own is emptied once it is long. NCCL goes on behind what was there: the
        file has a hole then, and takes as much of the disk as what follows.
        """
        if not self._log_path:
            return ""
        try:
            with open(self._log_path, "rb") as log:
                log.seek(self._log_offset)
                data = log.read()
        except OSError:
            return ""
        self._log_offset += len(data)
        if self._log_offset - self._log_begin > NCCL_LOG_BYTES and is_own_nccl_log(self._log_path):
            with contextlib.suppress(OSError):
                os.truncate(self._log_path, 0)
                self._log_begin = self._log_offset
        return data.decode("utf-8", "replace")
