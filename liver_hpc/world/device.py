"""The device of a worker: CUDA with NCCL, or the CPU with gloo. Decided here alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from liver_hpc.cluster.network import GLOO_INTERFACE, NCCL_LOG
from liver_hpc.host.interfaces import interface_addresses, interface_holding
from liver_hpc.transport.nccl_log import Chosen, NcclLog


@dataclass(frozen=True)
class Device:
    """A torch device, and the process-group backend that goes with it."""

    torch_device: torch.device

    @property
    def backend_name(self) -> str:
        return "nccl" if self.torch_device.type == "cuda" else "gloo"

    def enter(self) -> None:
        """Makes this the calling thread's device. Every thread that touches tensors calls it once,
        because torch keeps the current CUDA device per thread."""
        if self.torch_device.type == "cuda":
            torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Waits for all work queued on the device."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


def open_device(local_rank: int) -> Device:
    """Claims this worker's device: CUDA device `local_rank` where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return Device(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from liver_hpc.world import cpu_shim

    cpu_shim.install()
    return Device(torch.device("cpu"))


class Network:
    """Opens group backends, and knows which transport each of them uses.

    The environment names the interfaces that gloo uses, else it uses that of the address
    `hostname`; and the file into which NCCL logs. All groups share one gloo device an interface,
    with its thread and its listening socket.
    """

    def __init__(self, device: Device, hostname: str) -> None:
        self._device = device
        self._hostname = hostname
        names = (name.strip() for name in os.environ.get(GLOO_INTERFACE, "").split(","))
        self._interfaces = [name for name in names if name]
        self._log_path = os.environ.get(NCCL_LOG)
        self._log = NcclLog()
        self._log_offset = 0
        self._chosen: WeakKeyDictionary[Any, Chosen] = WeakKeyDictionary()

    @cached_property
    def _gloo_devices(self) -> list[Any]:
        create = dist.ProcessGroupGloo.create_device
        named = [create(interface=name, lazy_init=False) for name in self._interfaces]
        return named or [create(hostname=self._hostname, lazy_init=False)]

    def open_backend(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """Connects one group's members over `store` and returns the c10d backend.

        Collective over the members: blocks until all have come or the store's deadline passes.
        """
        timeout = timedelta(seconds=timeout_s)
        backend: Any
        if self._device.backend_name == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            backend = nccl(store, rank, size, options)
            # NCCL connects at the first collective, for which the store must still be there.
            backend.allreduce([torch.zeros(1, device=self._device.torch_device)]).wait()
            self._device.synchronize()
            chosen = self._log.read(self._newly_logged())
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = self._gloo_devices
            backend = gloo(store, rank, size, options)
            chosen = Chosen(("gloo tcp",), self._gloo_way())
        backend._set_sequence_number_for_group()
        if size > 1:
            self._chosen[backend] = chosen
        return backend

    def transports(self, backends: Iterable[Any]) -> Chosen:
        """The transports that these backends use; groups of one use none.

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
        """What NCCL has logged since the last call."""
        if not self._log_path:
            return ""
        try:
            with open(self._log_path, "rb") as log:
                log.seek(self._log_offset)
                data = log.read()
        except OSError:
            return ""
        self._log_offset += len(data)
        return data.decode("utf-8", "replace")
