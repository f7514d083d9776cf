"""Probes on nodes: each a step of the allocation, whose lines of JSON are read under a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.doctor.allocation import Allocation
from liver_hpc.errors import LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded, quiet_thread

_STOP_S = 15.0
_TOLD_BYTES = 2000

Said = dict[str, Any]
"""What a probe says: one line of JSON."""


class ProbeFailed(LiverError):
    """A probe said that it could not, or ended without having said anything."""


class Probe:
    """One step under way; leaving its `with` ends it."""

    def __init__(self, words: Sequence[str], waits_for: str) -> None:
        self._waits_for = waits_for
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complaints = os.memfd_create("what a probe complains of")
        self._process = subprocess.Popen(
            guarded(words, signal.SIGTERM),
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            start_new_session=True,
        )
        quiet_thread(self._read, "probe")

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """SIGTERM, which srun passes on; what has not ended then goes with the allocation."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        os.close(self._complaints)

    def say(self, limit_s: float) -> Said:
        """The next line. Raises ProbeFailed when there is none, DeadlineError when it is late."""
        deadline = Deadline.after(SystemClock(), limit_s, self._waits_for)
        while True:
            try:
                line = self._lines.get(timeout=max(0.001, deadline.remaining_s()))
            except queue.Empty:
                raise deadline.error() from None
            if line is None:
                raise ProbeFailed(f"{self._waits_for}: {self._complaint()}")
            try:
                said = json.loads(line)
            except ValueError:
                continue  # something that a site's profile prints
            if isinstance(said, dict):
                return _checked(said, self._waits_for)

    def _complaint(self) -> str:
        code = self._process.wait(_STOP_S)
        start = max(0, os.fstat(self._complaints).st_size - _TOLD_BYTES)
        said = os.pread(self._complaints, _TOLD_BYTES, start).decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or f"it ended with exit code {code} and said nothing"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)


def _checked(said: Said, waits_for: str) -> Said:
    if "error" in said:
        raise ProbeFailed(f"{waits_for}: {said['error']}")
    return said


@dataclass(frozen=True)
class Steps:
    """Starts probes on the nodes of an allocation. python: the interpreter's words there."""

    allocation: Allocation
    python: tuple[str, ...]
    gpus_per_node: int = 0

    def start(self, probe: str, nodes: Sequence[str], arguments: Sequence[str] = ()) -> Probe:
        """One task of `probe` on each of `nodes`."""
        program = shutil.which("srun")
        if program is None:
            raise LiverError("srun is not on the path")
        count = len(nodes)
        words = [program, f"--jobid={self.allocation.job}", f"--nodelist={','.join(nodes)}"]
        words += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap"]
        words += ["--cpu-bind=none", "--input=none", "--unbuffered", "--kill-on-bad-exit=0"]
        words += [f"--job-name=doctor-{probe}", "--mpi=none"]
        if self.gpus_per_node:
            words.append(f"--gpus-per-node={self.gpus_per_node}")
        words += [*self.python, "-m", "liver_hpc.doctor.probe", probe, *arguments]
        return Probe(words, f"the {probe} probe on {', '.join(nodes)}")

    @contextlib.contextmanager
    def answering(
        self, probe: str, node: str, arguments: Sequence[str], limit_s: float
    ) -> Iterator[tuple[Probe, Said]]:
        """A probe that serves another one: it, and the line in which it says where."""
        with self.start(probe, [node], arguments) as server:
            yield server, server.say(limit_s)
