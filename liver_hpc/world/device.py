"""The device of a worker: CUDA with NCCL, or the CPU with gloo. Decided here alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from liver_hpc.host.interfaces import interface_addresses, interface_holding
from liver_hpc.transport.nccl_log import Chosen, NcclLog


@dataclass(frozen=True)
class Device:
    """A torch device, and the process-group backend that goes with it."""

    torch_device: torch.device
    backend_name: str

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
        return Device(device, "nccl")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from liver_hpc.world import cpu_shim

    cpu_shim.install()
    return Device(torch.device("cpu"), "gloo")


@dataclass(frozen=True)
class NetworkPlan:
    """Where a worker's connections go.

    gloo_interfaces: by name; where there are none, gloo uses that of the address `hostname`.
    nccl_log: the file into which NCCL logs; None where it does not.
    """

    hostname: str
    gloo_interfaces: tuple[str, ...] = ()
    nccl_log: Path | None = None


class Network:
    """Opens group backends, and knows which transport each of them uses.

    All groups share one gloo device an interface, with its thread and its listening socket.
    """

    def __init__(self, device: Device, plan: NetworkPlan) -> None:
        self._device = device
        self._plan = plan
        self._log = NcclLog()
        self._log_offset = 0
        self._chosen: WeakKeyDictionary[Any, Chosen] = WeakKeyDictionary()

    @cached_property
    def _gloo_devices(self) -> list[Any]:
        names, create = self._plan.gloo_interfaces, dist.ProcessGroupGloo.create_device
        wheres = [{"interface": name} for name in names] or [{"hostname": self._plan.hostname}]
        return [create(**where, lazy_init=False) for where in wheres]

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
        names = self._plan.gloo_interfaces
        if names:
            return ",".join(f"{name}/{held.get(name, '?')}" for name in names)
        address = self._plan.hostname
        return f"{interface_holding(address, held) or '?'}/{address}"

    def _newly_logged(self) -> str:
        """What NCCL has logged since the last call."""
        if self._plan.nccl_log is None:
            return ""
        try:
            with self._plan.nccl_log.open("rb") as log:
                log.seek(self._log_offset)
                data = log.read()
        except OSError:
            return ""
        self._log_offset += len(data)
        return data.decode("utf-8", "replace")
