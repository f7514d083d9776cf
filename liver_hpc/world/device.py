"""The device of a worker: CUDA with NCCL, or the CPU with gloo. The only place that decides."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Device:
    """A torch device, and the process-group backend that goes with it."""

    torch_device: torch.device
    backend_name: str

    @property
    def backend_type(self) -> Any:
        kinds = dist.ProcessGroup.BackendType
        return kinds.NCCL if self.backend_name == "nccl" else kinds.GLOO

    def enter(self) -> None:
        """Makes this the calling thread's device; every thread that touches tensors does so once
        (torch keeps the current CUDA device per thread)."""
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


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


class Network:
    """Opens group backends on one interface, or on the address `hostname` where none is named.

    One gloo device a process: all groups share its thread and its listening socket.
    """

    def __init__(self, device: Device, interface: str | None, hostname: str) -> None:
        self._device = device
        self._interface = interface
        self._hostname = hostname
        self._gloo: Any = None

    def _gloo_device(self) -> Any:
        if self._gloo is None:
            if self._interface:
                self._gloo = dist.ProcessGroupGloo.create_device(
                    interface=self._interface, lazy_init=False
                )
            else:
                self._gloo = dist.ProcessGroupGloo.create_device(
                    hostname=self._hostname, lazy_init=False
                )
        return self._gloo

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
            # NCCL connects at the first collective; the store is not there for ever.
            backend.allreduce([torch.zeros(1, device=self._device.torch_device)]).wait()
            self._device.synchronize()
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [self._gloo_device()]
            backend = gloo(store, rank, size, options)
        backend._set_sequence_number_for_group()
        return backend
