"""CPUs near a worker's GPU: what the kernel says of them, and each worker's share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it: "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def local_cpus(pci_address: str, devices: Path = PCI_DEVICES) -> frozenset[int]:
    """The CPUs that are next to a device, such as "0000:65:00.0"; none where the kernel does not
    say."""
    try:
        return cpu_list((devices / pci_address / "local_cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


def share_of_cpus(
    gpu: int, near: Sequence[Collection[int]], allowed: Collection[int]
) -> frozenset[int]:
    """Of the CPUs that are near a GPU and allowed, an even share of all GPUs that these are near.

    near: of each GPU of the node. Of every run of consecutive CPUs each GPU gets its part, for the
    threads of a core are numbered in different runs. Nothing where no allowed CPU is near; all that
    are near where they are too few to be shared.
    """
    usable = [frozenset(cpus) & frozenset(allowed) for cpus in near]
    mine = usable[gpu]
    sharers = [other for other, cpus in enumerate(usable) if cpus == mine]
    at, count = sharers.index(gpu), len(sharers)
    runs = _runs(mine)
    if any(len(run) < count for run in runs):
        runs = [sorted(mine)]
    if len(mine) < count:
        return mine
    return frozenset(
        cpu for run in runs for cpu in run[at * len(run) // count : (at + 1) * len(run) // count]
    )


def _runs(cpus: Collection[int]) -> list[list[int]]:
    """Consecutive ones together."""
    numbered = enumerate(sorted(cpus))
    grouped = groupby(numbered, key=lambda each: each[1] - each[0])
    return [[cpu for _, cpu in run] for _, run in grouped]


def bind_process(cpus: Collection[int]) -> None:
    """Keeps all threads of this process to these CPUs, and those that they will start. Raises
    OSError for CPUs that it may not use."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)
