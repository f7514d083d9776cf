"""Child processes: one ends with this process, and once it was ended nothing of it is left.

Linux only. Each child runs below a short interpreter of its own, which sets what has to be set
between fork and exec, and has a mark in its environment by which its whole
tree is found (`marks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Literal

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.marks import kill_marked, marked_processes
from liver_hpc.host.process import clean_environment, end_of, quiet_thread

EXIT_ORPHANED = 86
"""Exit code of a process that found its parent already gone when it started."""

_PR_SET_PDEATHSIG = 1

_START_S = 30.0
_KILL_S = 5.0
_MARK = "LIVER_CHILD_"
_SET = "1"  # what a mark is set to

# Runs in an interpreter of its own between the parent and the command: the parent may have
# threads, so nothing may run between its fork and the exec. What the thread that forked had
# blocked would stay blocked in the whole tree; what came meanwhile is dropped if it is ignored.
_GUARD = f"""
import ctypes, os, signal, sys
parent, number, ignored, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
for one in filter(None, ignored.split(",")):
    signal.signal(int(one), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if number:
    ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, ({_PR_SET_PDEATHSIG}, number, 0, 0, 0)))
    if os.getppid() != parent:
        sys.exit({EXIT_ORPHANED})
try:
    os.execv(command[0], command)
except OSError as error:
    sys.exit(f"{{command[0]}}: {{error.strerror}}")
"""


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*map(ctypes.c_ulong, (option, value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process once the thread that started it has ended; ends it now where
    its parent, which had that process id, has ended already. Raises OSError."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_ORPHANED)


_log = logging.getLogger(__name__)


def new_mark() -> str:
    """The name of a variable that no other child has in its environment."""
    return f"{_MARK}{secrets.token_hex(8)}"


def mark_of(*names: str) -> str:
    """The mark of what has these names, which another process can tell, too."""
    return f"{_MARK}{hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"


def is_left(mark: str) -> bool:
    """Whether anything lives of a child that another process has started."""
    return bool(marked_processes(mark, _SET))


def kill_left(*marks: str) -> list[int]:
    """Kills what lives of children with these marks, whoever has started them: whom. Raises
    DeadlineError when some do not end (stuck in the kernel)."""
    return kill_marked(marks, _SET, _KILL_S)


@dataclass(frozen=True)
class Command:
    """What a child runs, and how.

    name: what errors call it. words: the first one is looked up on the path. orphan_signal: what
    the child gets when this process has ended, however that happened; None where it outlives it.
    environment: the whole of it; None for this process's own without what belongs to the launch
    that it came from. stdout, stderr: as `subprocess` takes them, pipes are text; what is None
    goes to `log` (appended), and without a log to where this process's goes. apart: whether the
    child leads a session or a process group of its own; what is sent to a group reaches all of
    it. ignored: signals that the child, and what it starts, ignores from its first instruction on
    unless it handles them. mark: children that end together may share one.
    """

    name: str
    words: Sequence[str]
    orphan_signal: signal.Signals | None = signal.SIGKILL
    environment: Mapping[str, str] | None = None
    stdin: int = subprocess.DEVNULL
    stdout: int | None = None
    stderr: int | None = None
    log: Path | None = None
    pass_fds: Sequence[int] = ()
    apart: Literal["session", "group"] | None = None
    ignored: Sequence[signal.Signals] = ()
    mark: str = field(default_factory=new_mark)


class Adopted:
    """A process that has become a child of this one without being started by it, for `Child`: what
    `subprocess` has of others. From any thread."""

    stdin = stdout = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._end = end_of(pid)
        weakref.finalize(self, os.close, self._end)  # no thread looks at it any more
        self._looking = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, -n for a death by signal n; None while it runs."""
        with self._looking:
            if self._code is None and wait([self._end], 0.0):
                self._code = self._exit_code()
        return self._code

    def _exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait(self, limit_s: float | None = None) -> int:
        """Raises TimeoutExpired."""
        if self._code is None:
            wait([self._end], limit_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), limit_s or 0.0)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        """To nobody once it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


class Foreign(Adopted):
    """A process that is nobody's child here: how it ended is not known, and taken for a kill."""

    def _exit_code(self) -> int:
        return -signal.SIGKILL


class Child:
    """A process that was started, from any thread: the thread may end before it; or one that was
    `adopted`, which is what `command` would have started.

    Raises LiverError when the command cannot be started. Something to select on: readable once
    the process has ended.
    """

    def __init__(self, command: Command, adopted: Adopted | None = None) -> None:
        self.name = command.name
        self.mark = command.mark
        self._leads_group = command.apart == "group"
        self._process = adopted or _start(command)
        self._end: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> IO[str]:
        """The pipe to it; `end` closes it."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[str]:
        """The pipe from it, for its reader to close."""
        assert self._process.stdout is not None
        return self._process.stdout

    def fileno(self) -> int:
        """A descriptor of the process; `end` closes it."""
        if self._end is None:
            self._end = end_of(self.pid)
        return self._end

    def exit_code(self) -> int | None:
        """None while the process runs; for a death by signal n, 128 + n as shells count."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def how(self) -> str:
        """How the process has ended: "exit code 1", "signal 9", or "still running"."""
        code = self._process.poll()
        if code is None:
            return "still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def wait(self, limit_s: float | None = None) -> int:
        """The exit code once the process has ended. Raises DeadlineError after `limit_s`."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"waited {limit_s:g} s for {self.name} to end") from None
        return code if code >= 0 else 128 - code

    def send_signal(self, signum: signal.Signals) -> None:
        """To the process, or to the group that it leads; to nobody once it has ended."""
        if not self._leads_group:
            self._process.send_signal(signum)
        elif self._process.poll() is None:
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:  # one that was forked just now leads none yet
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signum)

    def end(self, limit_s: float, first: signal.Signals = signal.SIGTERM) -> list[int]:
        """Sends `first`, after `limit_s` kills what still lives of the whole tree.

        With a limit of 0 all is killed at once. A child that has ended may still have left others
        behind: they are killed too. Returns whom it killed; raises DeadlineError when some of
        them do not end (stuck in the kernel). Idempotent.
        """
        return end_all([self], limit_s, first)

    def _release(self) -> None:
        """Waits for the killed process, and closes what this side holds of it."""
        self.wait(_KILL_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._end is not None:
            os.close(self._end)
            self._end = None


def end_all(
    children: Sequence[Child], limit_s: float, first: signal.Signals = signal.SIGTERM
) -> list[int]:
    """Ends them as `Child.end` does, all within the same `limit_s`."""
    living = [child for child in children if child.exit_code() is None]
    if limit_s > 0:
        for child in living:
            child.send_signal(first)
    deadline = Deadline.after(SystemClock(), limit_s, "children to end")
    for child in living:
        try:
            child.wait(deadline.remaining_s())
        except DeadlineError:
            if limit_s > 0:
                _log.warning("%s has not ended %g s after %s", child.name, limit_s, first.name)
            # By its number too: it has no mark for a moment while it becomes another program.
            child.send_signal(signal.SIGKILL)
    killed = kill_left(*{child.mark for child in children})
    for child in children:
        child._release()
    return killed


def kill_at_last(child: Child) -> None:
    """Kills what lives of its tree; what is stuck in the kernel is left, and said."""
    try:
        child.end(0.0)
    except DeadlineError as error:
        _log.error("%s", error)


def _start(command: Command) -> subprocess.Popen[str]:
    """Returns once the process runs. Raises LiverError, DeadlineError."""
    started: Future[subprocess.Popen[str]] = Future()
    _spawner(os.getpid()).put((command, started))
    try:
        return started.result(_START_S)
    except TimeoutError:
        started.add_done_callback(lambda late: late.result().kill())
        raise DeadlineError(f"waited {_START_S:g} s for {command.name} to start") from None
    except OSError as error:
        raise LiverError(f"{command.name} cannot be started: {error}") from error


_Orders = queue.SimpleQueue[tuple[Command, Future[subprocess.Popen[str]]]]


@functools.cache
def _spawner(pid: int) -> _Orders:
    """Leads to a thread that starts all children of process `pid`, and lives as long as that.

    The kernel takes the end of the thread that started a process for the end of its parent. The
    thread takes no signals, so that what comes to a child before it has set its own waits. A
    forked child needs one of its own.
    """
    orders: _Orders = queue.SimpleQueue()

    def serve() -> None:
        while True:
            command, started = orders.get()
            try:
                started.set_result(_popen(command))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                started.set_exception(error)

    quiet_thread(serve, "spawner")
    return orders


def _popen(command: Command) -> subprocess.Popen[str]:
    program = shutil.which(command.words[0])
    if program is None:
        raise FileNotFoundError(f"there is no command {command.words[0]!r} on the path")
    given = command.environment
    environment = clean_environment(os.environ) if given is None else given
    ignored = ",".join(str(int(one)) for one in command.ignored)
    told = [str(os.getpid()), str(int(command.orphan_signal or 0)), ignored]
    with contextlib.ExitStack() as stack:
        output = None
        if command.log is not None:
            command.log.parent.mkdir(exist_ok=True)
            output = stack.enter_context(command.log.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, *told, program, *command.words[1:]],
            env={**environment, command.mark: _SET},
            stdin=command.stdin,
            stdout=output if command.stdout is None else command.stdout,
            stderr=output if command.stderr is None else command.stderr,
            pass_fds=command.pass_fds,
            start_new_session=command.apart == "session",
            process_group=0 if command.apart == "group" else None,
            encoding="utf-8",
            errors="replace",
        )
