"""A peer's job on this machine: its processes, its steps, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import ClassVar

import psutil

from benchmarks.peers.events import JOIN, LEAVE, Change, Step, merged, settled
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded

TOKEN = "LIVER_PEER_JOB"
"""Every process of a job has it in its environment, however far from here it was started."""
POLL_S = 0.05
KILL_S = 10.0


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
        self._token = uuid.uuid4().hex
        self._members: list[subprocess.Popen[bytes]] = []
        self._gone: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PeerJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if event == JOIN:
            self.add()
        else:
            self.remove()
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
        with (self.directory / f"member-{len(self._members) + len(self._gone)}.log").open(
            "ab"
        ) as log:
            self._members.append(
                subprocess.Popen(
                    guarded(command),
                    env={
                        **clean_environment(os.environ),
                        "OMP_NUM_THREADS": "1",
                        **(environment or {}),
                        TOKEN: self._token,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _end_last(self, number: signal.Signals) -> None:
        member = self._members.pop()
        self._gone.append(member)
        member.send_signal(number)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        """Raises LiverError when a member ends by itself, DeadlineError at the limit."""
        deadline = Deadline.after(SystemClock(), self._limit_s, f"{what} in {type(self).__name__}")
        while not holds():
            deadline.check()
            for member in self._members:
                if member.poll() is not None:
                    raise LiverError(
                        f"a process of {type(self).__name__} ended with {member.returncode}: "
                        f"{self._last_words()}"
                    )
            Event().wait(POLL_S)

    def _last_words(self) -> str:
        texts = [p.read_text(errors="replace") for p in sorted(self.directory.glob("member-*"))]
        lines = [line.strip() for text in texts for line in text.splitlines() if "Error" in line]
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """SIGKILL for every process of the job, wherever it has moved to. Idempotent."""
        deadline = Deadline.after(SystemClock(), KILL_S, f"the end of {type(self).__name__}")

        def all_gone() -> bool:
            left = self._living()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return not left

        poll_until(all_gone, deadline, POLL_S)
        for member in (*self._members, *self._gone):
            member.wait(KILL_S)

    def _living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(TOKEN) == self._token:
                    found.append(process)
        return found


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
