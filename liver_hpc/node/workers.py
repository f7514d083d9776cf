"""The workers of one agent as processes: started, listened to while they boot, told, ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded
from liver_hpc.host.marks import kill_marked
from liver_hpc.rendezvous.base import Answer

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""By these Slurm announces the end of a node, to the agent and maybe to all below it."""

_MARK = "LIVER_AGENT_WORKERS"
_MAX_LINE_BYTES = 4096
_REAP_S = 1.0

log = logging.getLogger(__name__)


class BootError(LiverError):
    """A worker did not get through its boot."""


@dataclass(frozen=True)
class WorkerPlan:
    """What an agent starts: a worker for each of `slots`, which is its LIVER_LOCAL_RANK.

    command: empty for the worker's own; another one stands in for it in tests. sheltered: warnings
    do not reach the workers; they are in process groups of their own, and ignore them.
    """

    run_directory: Path
    agent: str
    slots: tuple[int, ...]
    layout: str
    command: tuple[str, ...] = ()
    sheltered: bool = False

    def command_line(self) -> list[str]:
        if self.command:
            return list(self.command)
        module = [sys.executable, "-P", "-m", "liver_hpc.worker.main"]
        return [*module, "--run-directory", str(self.run_directory), "--layout", self.layout]

    def log_of(self, index: int) -> Path:
        return self.run_directory / "logs" / f"worker-{self.agent}-{index}.log"


@dataclass
class _Child:
    """One worker: its process, and the agent's ends of its two pipes.

    end: a pidfd, readable once the process has ended. worker: its id, once it was told.
    """

    index: int
    process: subprocess.Popen[bytes]
    end: int
    from_worker: int
    to_worker: int
    said: bytes = b""
    booted: bool = False
    worker: int | None = None


class NodeWorkers:
    """Registers what is to be waited for with `selector`, with a function to be called then.

    These raise BootError as long as no ids were handed out. From then on `report` is called for
    every worker that does not end well, with its id and how it ended. All in one thread, with
    which the workers die.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        selector: selectors.BaseSelector,
        report: Callable[[int, str], None],
    ) -> None:
        self._plan = plan
        self._selector = selector
        self._report = report
        self._mark = secrets.token_hex(8)
        self._children: list[_Child] = []

    def start(self) -> None:
        for index in range(len(self._plan.slots)):
            self._children.append(self._spawn(index))

    def booting(self) -> list[int]:
        """Those that have not booted yet, by their number on this node."""
        return [child.index for child in self._children if not child.booted]

    def living(self) -> list[int]:
        return [child.index for child in self._children if child.process.poll() is None]

    def worst(self) -> int:
        """The highest exit code of those that have ended, as `worst` counts."""
        codes = [child.process.poll() for child in self._children]
        return worst(code for code in codes if code is not None)

    def hand_out(self, answer: Answer) -> None:
        """Tells every worker its id and where the coordinator listens."""
        for child, worker in zip(self._children, answer.worker_ids, strict=True):
            child.worker = worker
            told = {"worker": worker, "host": answer.control_host, "port": answer.control_port}
            try:
                os.write(child.to_worker, json.dumps(told).encode() + b"\n")
            except BrokenPipeError:
                log.error("worker %d does not listen", child.index)
            finally:
                os.close(child.to_worker)

    def end(self, exit_s: float) -> None:
        """Tells the living to end, kills those that live on after `exit_s`; nothing is left."""
        polite = signal.SIGHUP if self._plan.sheltered else signal.SIGTERM
        living = [child for child in self._children if child.process.poll() is None]
        for child in living:
            self._signal(child, polite)
        deadline = Deadline.after(SystemClock(), exit_s, "workers to end")
        for child in living:
            try:
                child.process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                log.warning(
                    "worker %d has not ended %g s after %s", child.index, exit_s, polite.name
                )
                self._signal(child, signal.SIGKILL)
        for child in living:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                child.process.wait(_REAP_S)
        try:
            kill_marked(_MARK, self._mark, _REAP_S)  # what they have started
        except DeadlineError as error:
            log.error("%s", error)

    # ---- one worker

    def _spawn(self, index: int) -> _Child:
        plan = self._plan
        read_by_worker, to_worker = os.pipe()
        from_worker, written_by_worker = os.pipe()
        environment = {
            **clean_environment(os.environ),
            _MARK: self._mark,
            "LIVER_LOCAL_RANK": str(plan.slots[index]),
            "LIVER_AGENT_READ_FD": str(read_by_worker),
            "LIVER_AGENT_WRITE_FD": str(written_by_worker),
        }
        # Several workers share a machine: two threads each would be slower than one.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("MKL_NUM_THREADS", "1")
        # Threads that come and go with every handoff would each leave a heap of their own behind.
        environment.setdefault("MALLOC_ARENA_MAX", "1")
        ignored = WARNINGS if plan.sheltered else ()
        with plan.log_of(index).open("ab") as output, _blocked(ignored):
            process = subprocess.Popen(
                guarded(plan.command_line(), ignored=ignored),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read_by_worker, written_by_worker),
                process_group=0 if plan.sheltered else None,
            )
        os.close(read_by_worker)
        os.close(written_by_worker)
        end = os.pidfd_open(process.pid)
        child = _Child(index, process, end, from_worker, to_worker)
        self._selector.register(from_worker, selectors.EVENT_READ, lambda: self._listen(child))
        self._selector.register(end, selectors.EVENT_READ, lambda: self._ended(child))
        return child

    def _listen(self, child: _Child) -> None:
        """Reads what a worker wrote; its end of the pipe is of no more use once it has booted."""
        data = os.read(child.from_worker, _MAX_LINE_BYTES)
        child.said += data
        line, newline, _ = child.said.partition(b"\n")
        if data and not newline and len(child.said) < _MAX_LINE_BYTES:
            return
        self._selector.unregister(child.from_worker)
        os.close(child.from_worker)
        child.booted = bool(newline) and _says_booted(line)
        if not child.booted:
            what = f"said {child.said[:80]!r} instead of having booted" if data else "ended in boot"
            raise BootError(self._obituary(child, what))

    def _ended(self, child: _Child) -> None:
        code = child.process.poll()
        if code is None:
            return
        self._selector.unregister(child.end)
        os.close(child.end)
        if child.worker is None:
            raise BootError(self._obituary(child, "ended in boot"))
        log.info("worker %d ended: %s", child.index, _how(code))
        if code != 0:
            name = self._plan.log_of(child.index).name
            self._report(child.worker, f"{_how(code)}; see logs/{name}")

    def _obituary(self, child: _Child, what: str) -> str:
        try:
            end = _how(child.process.wait(_REAP_S))
        except subprocess.TimeoutExpired:
            end = "still running"
        return (
            f"worker {child.index} of agent {self._plan.agent} {what} ({end}); "
            f"see {self._plan.log_of(child.index)}"
        )

    def _signal(self, child: _Child, signum: signal.Signals) -> None:
        """To a worker that was not waited for yet; a sheltered one's whole group."""
        if self._plan.sheltered:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signum)
        else:
            child.process.send_signal(signum)


def worst(codes: Iterable[int]) -> int:
    """The highest of the workers' exit codes, a death by signal n counted as 128 + n."""
    return max((code if code >= 0 else 128 - code for code in codes), default=0)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _says_booted(line: bytes) -> bool:
    try:
        said = json.loads(line)
    except ValueError:
        return False
    return isinstance(said, Mapping) and said.get("booted") is True


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """A child that is started meanwhile begins with them blocked; here they come afterwards."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
