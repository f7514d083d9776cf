"""Time: a clock that can be faked, and deadlines that name whom they wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from liver_hpc.errors import DeadlineError


class Clock(Protocol):
    """A source of wall time that never jumps within a process."""

    def now_s(self) -> float:
        """Seconds since the epoch, advancing with the monotonic clock."""
        ...


class SystemClock:
    """Epoch seconds at process start plus the monotonic clock: comparable and never set back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()


def process_age_s() -> float:
    """Seconds since the kernel started this process: before its interpreter was loaded."""
    started_s = started_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def started_ticks(pid: int) -> int:
    """When the kernel started a process of this machine, in ticks since the machine's boot: no
    clock that is set changes it. Raises OSError."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(after_name[19])  # field 22 of proc(5)


class FakeClock:
    """A clock that moves only when it is told to; for tests."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass(frozen=True)
class Deadline:
    """A point in time by which something must have happened, and who it is waited for."""

    clock: Clock
    at_s: float
    limit_s: float
    waits_for: str

    @classmethod
    def after(cls, clock: Clock, limit_s: float, waits_for: str) -> Deadline:
        return cls(clock, clock.now_s() + limit_s, limit_s, waits_for)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock.now_s())

    def expired(self) -> bool:
        return self.clock.now_s() >= self.at_s

    def error(self) -> DeadlineError:
        return DeadlineError(f"waited {self.limit_s:g} s for {self.waits_for}")

    def check(self) -> None:
        """Raises DeadlineError once the deadline has passed."""
        if self.expired():
            raise self.error()


def poll_until(condition: Callable[[], bool], deadline: Deadline, interval_s: float = 0.02) -> None:
    """Waits until `condition()` holds; raises DeadlineError at the deadline.

    For outside effects that cannot notify (a file that appears, a process that ends).
    """
    while not condition():
        deadline.check()
        time.sleep(min(interval_s, max(deadline.remaining_s(), 0.001)))
