"""Processes of a run, seen from outside, and what they hold."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError

ENDED_S = 30.0


def living(word: str) -> list[psutil.Process]:
    """Processes with `word` in their command line, and their descendants; never this one."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if word in words and process.pid != psutil.Process().pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(found.values())


def outliving(word: str) -> int:
    """How many of them there are still, half a minute after they should have ended."""
    deadline = Deadline.after(SystemClock(), ENDED_S, f"the processes of {word} to end")
    with contextlib.suppress(DeadlineError):
        poll_until(lambda: not living(word), deadline, 0.1)
    return len(living(word))


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """To those that still live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def own_bytes(pid: int) -> int:
    """What one process holds in memory that is not a file's: also pages that it still shares with
    the process it was forked from, so that the figure does not move when that one or a sibling
    ends. Raises OSError where the process is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kib = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, flags=re.MULTILINE)
    return 1024 * sum(int(each) for each in kib)


@dataclass(frozen=True)
class Footprint:
    """What processes hold together. memory_bytes: proportional set size, in which what several
    share counts once."""

    processes: int
    threads: int
    descriptors: int
    memory_bytes: int


def footprint(processes: Iterable[psutil.Process]) -> Footprint:
    """Of those that still live."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            memory_bytes = int(process.memory_full_info().pss)
            found.append((process.num_threads(), process.num_fds(), memory_bytes))
    threads, descriptors, memory_bytes = (
        (sum(each) for each in zip(*found, strict=True)) if found else (0, 0, 0)
    )
    return Footprint(len(found), threads, descriptors, memory_bytes)
