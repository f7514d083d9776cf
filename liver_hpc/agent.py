"""The agent of a (virtual) node: starts its workers, meets the coordinator for them, stays.

The workers of `python -m liver_hpc.agent` boot at once and alone; when all have booted the
agent has a short-lived child meet the front desk over MPI (`joiner_process`), gives each worker
its id and the coordinator's address, and from then on only waits for them. Whatever ends the
agent ends its workers; one worker's end does not touch the others.

Exit codes: the workers' worst one (128 + n for signal n), 128 + n when told to stop by signal n
(SIGTERM also stands for the end of the parent), those named below, and those of
`rendezvous.joiner`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.environment import clean_environment
from liver_hpc.config.load import load_run
from liver_hpc.errors import LiverError
from liver_hpc.joiner_process import JoinerProcess, NotMet, mpi_launch
from liver_hpc.layout.coordinates import Layout
from liver_hpc.lifeline import guarded, on_parent_exit
from liver_hpc.rendezvous.meeting import Answer, Identity

EXIT_FAILED = 1
"""The agent itself failed; its log says how."""
EXIT_BOOT = 87
"""A worker died in its boot, or did not finish it in time."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_LINE_BYTES = 4096
_REAP_S = 1.0
# How much longer than its own deadline a joiner gets to end by itself and say why.
_MEET_MARGIN_S = 3.0

log = logging.getLogger(__name__)


class BootError(LiverError):
    """A worker did not get through its boot."""


class Stopped(LiverError):
    """The agent was told to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


@dataclass(frozen=True)
class Options:
    """The command line. `worker_command` stands in for the worker's own in tests."""

    run_directory: Path
    agent: str
    workers: int
    layout: str
    worker_command: tuple[str, ...] | None


@dataclass
class Child:
    """One worker: its process, and the agent's ends of its two pipes.

    end: a pidfd, readable once the process has ended.
    """

    index: int
    process: subprocess.Popen[bytes]
    end: int
    from_worker: int
    to_worker: int
    said: bytes = b""
    booted: bool = False


@dataclass
class Signals:
    """Signals of this process as something to select on."""

    reader: int
    pending: list[int] = field(default_factory=list)

    @classmethod
    def install(cls) -> Signals:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signals = cls(reader)
        for signum in _STOP_SIGNALS:
            signal.signal(signum, signals._note)
        # Whoever started us may have had them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_STOP_SIGNALS))
        return signals

    def check(self) -> None:
        """Raises Stopped when a signal to stop has come."""
        try:
            while os.read(self.reader, 4096):
                pass
        except BlockingIOError:
            pass
        if self.pending:
            raise Stopped(self.pending[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum in _STOP_SIGNALS:
            self.pending.append(signum)


class Agent:
    """The agent's life, in the order of its methods; all in the main thread.

    Workers die with the thread that started them: hence the main thread and no other.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._clock = SystemClock()
        self._signals = Signals.install()
        self._children: list[Child] = []
        self._reported: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.reader, selectors.EVENT_READ)

    def run(self) -> int:
        """The agent's exit code. Raises LiverError when its workers never got to work."""
        mpi_launch([])  # raises now rather than after the boot when there is no way into MPI
        for index in range(self._options.workers):
            self._children.append(self._spawn(index))
        on_parent_exit(lambda: os.kill(os.getpid(), signal.SIGTERM))
        deadlines = load_run(self._options.run_directory / "run.yaml").deadlines
        try:
            self._await_boot(deadlines.boot_s)
            self._hand_out(self._meet(deadlines.meet_s))
            return self._supervise()
        except Stopped as stop:
            log.info("%s: ending workers %s", stop, self._living())
            return 128 + stop.signum
        finally:
            self._end_workers(deadlines.exit_s)

    def _spawn(self, index: int) -> Child:
        read_by_worker, to_worker = os.pipe()
        from_worker, written_by_worker = os.pipe()
        environment = {
            **clean_environment(os.environ),
            "LIVER_LOCAL_RANK": str(index),
            "LIVER_AGENT_READ_FD": str(read_by_worker),
            "LIVER_AGENT_WRITE_FD": str(written_by_worker),
        }
        # Several workers share a machine: two threads each would be slower than one.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("MKL_NUM_THREADS", "1")
        # Threads that come and go with every handoff would each leave a heap of their own behind.
        environment.setdefault("MALLOC_ARENA_MAX", "1")
        with self._log_of(index).open("ab") as output:
            process = subprocess.Popen(
                guarded(self._command()),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read_by_worker, written_by_worker),
            )
        os.close(read_by_worker)
        os.close(written_by_worker)
        end = os.pidfd_open(process.pid)
        child = Child(index, process, end, from_worker, to_worker)
        self._selector.register(from_worker, selectors.EVENT_READ, child)
        self._selector.register(end, selectors.EVENT_READ)
        return child

    def _command(self) -> list[str]:
        if self._options.worker_command is not None:
            return list(self._options.worker_command)
        module = [sys.executable, "-m", "liver_hpc.worker"]
        run = ["--run-directory", str(self._options.run_directory)]
        return [*module, *run, "--layout", self._options.layout]

    def _log_of(self, index: int) -> Path:
        return self._options.run_directory / "logs" / f"worker-{self._options.agent}-{index}.log"

    def _await_boot(self, boot_s: float) -> None:
        deadline = Deadline.after(self._clock, boot_s, "workers to boot")
        while late := [child.index for child in self._children if not child.booted]:
            if deadline.expired():
                raise BootError(f"waited {boot_s:g} s for workers {late} to boot")
            for key, _ in self._selector.select(deadline.remaining_s()):
                if isinstance(key.data, Child):
                    self._listen(key.data)
            self._signals.check()
            self._check_boot()
        log.info("all %d workers have booted", len(self._children))

    def _listen(self, child: Child) -> None:
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

    def _check_boot(self) -> None:
        for child in self._children:
            if child.process.poll() is not None:
                raise BootError(self._obituary(child, "ended in boot"))

    def _obituary(self, child: Child, what: str) -> str:
        try:
            end = _how(child.process.wait(_REAP_S))
        except subprocess.TimeoutExpired:
            end = "still running"
        return (
            f"worker {child.index} of agent {self._options.agent} {what} ({end}); "
            f"see {self._log_of(child.index)}"
        )

    def _meet(self, meet_s: float) -> Answer:
        identity = Identity(
            agent=self._options.agent,
            host=socket.gethostname(),
            pid=os.getpid(),
            workers=self._options.workers,
        )
        limit_s = meet_s + _MEET_MARGIN_S
        deadline = Deadline.after(self._clock, limit_s, "the joiner to end")
        joiner = JoinerProcess(self._options.run_directory, identity, meet_s)
        self._selector.register(joiner.end, selectors.EVENT_READ)
        try:
            while (answer := joiner.answer()) is None:
                if deadline.expired():
                    raise NotMet(f"waited {limit_s:g} s for the joiner to end")
                self._selector.select(deadline.remaining_s())
                self._signals.check()
                self._check_boot()
        finally:
            self._selector.unregister(joiner.end)
            joiner.close()
        log.info("met the front desk: workers %s", list(answer.worker_ids))
        return answer

    def _hand_out(self, answer: Answer) -> None:
        for child, worker in zip(self._children, answer.worker_ids, strict=True):
            told = {"worker": worker, "host": answer.control_host, "port": answer.control_port}
            try:
                os.write(child.to_worker, json.dumps(told).encode() + b"\n")
            except BrokenPipeError:
                log.error("worker %d does not listen", child.index)
            finally:
                os.close(child.to_worker)

    def _supervise(self) -> int:
        """Waits until every worker has ended; their worst exit code."""
        while True:
            codes = [child.process.poll() for child in self._children]
            for child, code in zip(self._children, codes, strict=True):
                if code is not None and child.index not in self._reported:
                    self._reported.add(child.index)
                    self._selector.unregister(child.end)
                    log.info("worker %d ended: %s", child.index, _how(code))
            if None not in codes:
                return worst(code for code in codes if code is not None)
            self._selector.select()
            self._signals.check()

    def _living(self) -> list[int]:
        return [child.index for child in self._children if child.process.poll() is None]

    def _end_workers(self, exit_s: float) -> None:
        """SIGTERM to the living, SIGKILL to those that live on after `exit_s`."""
        living = [child for child in self._children if child.process.poll() is None]
        for child in living:
            child.process.terminate()
        deadline = Deadline.after(self._clock, exit_s, "workers to end")
        for child in living:
            try:
                child.process.wait(deadline.remaining_s())
            except subprocess.TimeoutExpired:
                log.warning("worker %d has not ended %g s after SIGTERM", child.index, exit_s)
                child.process.kill()
        for child in living:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                child.process.wait(_REAP_S)


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


def parse_options(arguments: list[str] | None = None) -> Options:
    """Reads the command line; exits with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(prog="liver_hpc.agent", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--agent", required=True, help="this agent's name, used once in a run")
    parser.add_argument("--workers", type=int, required=True, help="how many workers to start")
    parser.add_argument("--layout", required=True, help="what they rehearse, as tp2 pp1 dp2")
    parser.add_argument("--worker-command", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    command = given.worker_command
    return Options(
        run_directory=given.run_directory.absolute(),
        agent=given.agent,
        workers=given.workers,
        layout=str(Layout.parse(given.layout)),
        worker_command=None if command is None else tuple(command),
    )


def _log_to(options: Options) -> None:
    """Sends everything that this process prints to logs/agent-NAME.log, its launcher's too."""
    path = options.run_directory / "logs" / f"agent-{options.agent}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [agent {options.agent}] %(message)s",
    )


def main() -> NoReturn:
    """Runs the agent and exits with its code."""
    options = parse_options()
    _log_to(options)
    try:
        code = Agent(options).run()
    except BootError as error:
        log.error("%s", error)
        code = EXIT_BOOT
    except NotMet as error:
        log.error("%s", error)
        code = error.code
    except Exception:
        log.exception("the agent failed")
        code = EXIT_FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
