"""One worker process: streams a transfer, without digests and with them, and sends the same bytes
raw, in turns."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import order_of
from benchmarks.stream.transfers import Transfer, pair_bytes
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.memory import move_bytes
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec
from liver_hpc.transport.digest import warm_up
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire
from liver_hpc.world.device import Device, open_device

WAYS = ("transfer", "digested", "raw whole", "raw buckets")
LIMIT_S = 120.0
SAMPLE_S = 0.001


@dataclass(frozen=True)
class Span:
    """When one worker was busy with one repeat, on the machine's monotonic clock."""

    way: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Report:
    """All of one worker. extra_bytes: resident memory that its first stream took at its peak."""

    spans: tuple[Span, ...]
    bytes_sent: int
    bytes_copied: int
    extra_bytes: int


class BoxState:
    """A coordinate's boxes as plain tensors, all touched; what a world's state is in a run."""

    def __init__(
        self, spec: ModelSpec, rank_map: RankMap, worker: int, fill: float, device: torch.device
    ) -> None:
        self._held: dict[tuple[str, int], list[tuple[Box, torch.Tensor]]] = {}
        at = rank_map.coordinate_of(worker)
        if at is None:
            return
        for kind in (PARAMETER, *spec.optimizer_kinds):
            for index in spec.held_tensors(rank_map.layout, at):
                self._held[kind, index] = [
                    (box, torch.full(box.shape, fill, device=device))
                    for box in owned_boxes(spec, rank_map.layout, at, kind, index)
                ]

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        for own, values in self._held[kind, tensor_index]:
            if own.intersect(box) == box:
                rows = slice(box.row0 - own.row0, box.row1 - own.row0)
                return values[rows, box.col0 - own.col0 : box.col1 - own.col0]
        raise AssertionError(f"{kind} of tensor {tensor_index} is not held: {box}")

    def filled_with(self, value: float, only: str | None = None) -> bool:
        """Whether every element of every box has this value; `only`: of the boxes of one kind."""
        return all(
            bool((values == value).all())
            for (kind, _), boxes in self._held.items()
            if only in (None, kind)
            for _, values in boxes
        )


class PeakMemory(AbstractContextManager["PeakMemory"]):
    """Bytes at their highest inside the block, over what they were at its start: resident ones of
    the process, on CUDA those that tensors have of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._peak = self._bytes_now()
        self._sampler.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._sampler.join()
        self.extra_bytes = max(self._peak, self._bytes_now()) - self._before

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._peak = max(self._peak, self._bytes_now())

    def _bytes_now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Process:
    """What a worker process has for the benchmark to call."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def measure(self, transfer: Transfer, repeats: int, store_path: str) -> Report:
        """Collective over the workers of a transfer, who meet in the file `store_path`."""
        worker = self._worker
        # Between CPUs nothing of Megatron's is wanted, nor what stands for CUDA there.
        device = open_device(worker) if torch.cuda.is_available() else Device(torch.device("cpu"))
        torch.set_num_threads(1)
        dist.init_process_group(
            device.backend_name,
            init_method=f"file://{store_path}",
            rank=worker,
            world_size=transfer.workers,
            timeout=timedelta(seconds=LIMIT_S),
        )
        _touch_all_links(worker, transfer.workers, device)
        measured = _Worker(worker, transfer, device)
        dist.barrier()
        # The first product loads code of torch's.
        warm_up(transfer.spec().tensors, device.torch_device)
        with PeakMemory(device.torch_device) as memory:
            measured.open()
            measured.stream(digest=True)
        measured.check()
        raw = _Raw(worker, transfer, device)
        spans = []
        for way in order_of(WAYS, repeats):
            dist.barrier()
            began_s = time.monotonic()
            if way in ("transfer", "digested"):
                measured.stream(digest=way == "digested")
            else:
                raw.exchange(transfer.handoff.bucket_bytes if way == "raw buckets" else None)
            spans.append(Span(way, began_s, time.monotonic()))
        dist.barrier()
        sizes = (measured.bytes_sent, measured.bytes_copied, memory.extra_bytes)
        return Report(tuple(spans), *sizes)


def _touch_all_links(worker: int, workers: int, device: Device) -> None:
    """The first message of a pair pays for what later ones do not."""
    peers = [peer for peer in range(workers) if peer != worker]
    words = torch.zeros(2, workers, device=device.torch_device)
    messages = [dist.P2POp(dist.irecv, words[0, peer : peer + 1], peer) for peer in peers]
    messages += [dist.P2POp(dist.isend, words[1, peer : peer + 1], peer) for peer in peers]
    _exchange(messages, device)


class _Worker:
    """Both worlds' memory and the transport between them."""

    def __init__(self, worker: int, transfer: Transfer, device: Device) -> None:
        self._device = device.torch_device
        self._spec = transfer.spec()
        self._transfer = transfer
        self._worker = worker
        self._source = BoxState(self._spec, transfer.source, worker, 2.5, self._device)
        self._target = BoxState(self._spec, transfer.target, worker, -1.0, self._device)
        self._plan = transfer_plan(self._spec, transfer.source, transfer.target, worker)
        self.bytes_sent = move_bytes(self._spec, self._plan.sends)
        self.bytes_copied = move_bytes(self._spec, self._plan.local)

    def open(self) -> None:
        ranks = {member: member for member in range(self._transfer.workers)}
        group: Any = dist.group.WORLD
        wire = group_wire(group._get_backend(self._device), ranks, self._device)
        self._transport = Transport(wire, self._spec, self._transfer.handoff)
        self._prepared = self._transport.prepare(self._plan)

    def stream(self, *, digest: bool) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the transfer")
        self._transport.stream(
            self._prepared,
            self._source,
            self._target,
            lambda _bytes: None,
            deadline,
            digest=digest,
        )

    def check(self) -> None:
        """All has arrived; a transfer that does nothing would be fast."""
        if not self._target.filled_with(2.5):
            raise AssertionError(f"worker {self._worker}: the target is not whole")


class _Raw:
    """The same bytes between the same pairs, from and into flat memory: nothing is packed."""

    def __init__(self, worker: int, transfer: Transfer, device: Device) -> None:
        self._device = device
        self._sends, self._receives = [], []
        for (sender, receiver), num_bytes in sorted(pair_bytes(transfer).items()):
            if worker in (sender, receiver):
                memory = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
                if worker == sender:
                    self._sends.append((receiver, memory))
                else:
                    self._receives.append((sender, memory))

    def exchange(self, message_bytes: int | None) -> None:
        """All messages at once; None: one message a pair."""
        messages = [
            dist.P2POp(way, part, peer)
            for way, pairs in ((dist.irecv, self._receives), (dist.isend, self._sends))
            for peer, memory in pairs
            for part in _parts(memory, message_bytes)
        ]
        _exchange(messages, self._device)


def _parts(memory: torch.Tensor, part_bytes: int | None) -> tuple[torch.Tensor, ...]:
    """Views of flat bytes; None: one."""
    return torch.split(memory, part_bytes or len(memory))


def _exchange(messages: Sequence[dist.P2POp], device: Device) -> None:
    """Starts all messages at once, and waits until they have crossed."""
    for handle in dist.batch_isend_irecv(list(messages)) if messages else ():
        handle.wait()
    device.synchronize()
