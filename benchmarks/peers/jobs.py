"""A peer's job on this machine: its processes, its steps, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import ClassVar

from benchmarks.peers.events import JOIN, KILL, LEAVE, Change, Step, merged, settled
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Child, Command, end_all
from liver_hpc.host.process import clean_environment

MARK = "LIVER_PEER_JOB"
"""A variable with such a name is in the environment of every process of a job."""
POLL_S = 0.05


class PeerJob(ABC):
    """A context manager whose processes are all killed at its end. `directory` holds run.yaml.

    limit_s: the longest that anything may take. events: what this peer can do, in order, each
    from as many workers as the one before it left.
    """

    events: ClassVar[tuple[str, ...]] = (JOIN, LEAVE)
    first_workers: ClassVar[int] = 1

    def __init__(self, directory: Path, limit_s: float) -> None:
        self.directory = directory
        self._limit_s = limit_s
        self._mark = f"{MARK}_{uuid.uuid4().hex}"
        self._members: list[Child] = []
        self._gone: list[Child] = []

    def __enter__(self) -> PeerJob:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @abstractmethod
    def begin(self) -> None:
        """Starts the first workers."""

    @abstractmethod
    def add(self) -> None:
        """Starts one more."""

    def remove(self) -> None:
        """Has the last one end, as a preemption warning does."""
        self._end_last(signal.SIGTERM)

    def kill(self) -> None:
        """The last one ends without a warning."""
        self._end_last(signal.SIGKILL)

    # ---- what is done to it

    def settle(self, workers: int, steps: int) -> None:
        """Until so many steps have been done by so many workers, from now on."""
        now = time.time()

        def done() -> bool:
            late = [s for s in self.steps() if s.workers == workers and s.started_s >= now]
            return len(late) >= steps

        self._until(done, f"{steps} steps of {workers} workers")

    def change(self, event: str, workers: int, steps: int) -> Change:
        """Does the event; returns when the new world has done `steps` steps after its first."""
        target = workers + 1 if event == JOIN else workers - 1
        change = Change(event, workers, target, time.time())
        {JOIN: self.add, LEAVE: self.remove, KILL: self.kill}[event]()
        self._until(
            lambda: len(settled(self.steps(), change)) > steps,
            f"{steps} steps after the first, of {target} workers after a {event}",
        )
        return change

    def steps(self) -> list[Step]:
        """All that the workers have written down, those that have ended included."""
        lines = []
        for path in self.directory.glob("steps-*"):
            lines += path.read_text(encoding="ascii").splitlines(keepends=True)
        return merged(Step.parse(line) for line in lines if line.endswith("\n"))

    # ---- processes

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts a member, in a session of its own; what it says goes to member-N.log."""
        number = len(self._members) + len(self._gone)
        own = {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._members.append(
            Child(
                Command(
                    f"member {number} of {type(self).__name__}",
                    command,
                    environment={**clean_environment(os.environ), **own},
                    log=self.directory / f"member-{number}.log",
                    apart="session",
                    mark=self._mark,
                )
            )
        )

    def _end_last(self, number: signal.Signals) -> None:
        self._gone.append(self._members.pop())
        self._gone[-1].send_signal(number)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        """Raises LiverError when a member ends by itself, DeadlineError at the limit."""
        deadline = Deadline.after(SystemClock(), self._limit_s, f"{what} in {type(self).__name__}")
        while not holds():
            deadline.check()
            for member in self._members:
                if member.exit_code() is not None:
                    raise LiverError(f"{member.name} ended: {member.how()}: {self._last_words()}")
            Event().wait(POLL_S)

    def _last_words(self) -> str:
        texts = [p.read_text(errors="replace") for p in sorted(self.directory.glob("member-*"))]
        lines = [line.strip() for text in texts for line in text.splitlines() if "Error" in line]
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """SIGKILL for every process of the job, wherever it has moved to. Idempotent."""
        end_all([*self._members, *self._gone], 0.0)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
