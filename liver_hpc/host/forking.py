"""The inside of a warm process: it has imported what others will need, and forks them on demand.

Whoever asks (`warm.py`) is its parent and becomes the parent of what it forks: it forks twice, and
the kernel gives a process whose parent has ended to the nearest ancestor that takes orphans in.
Before that a forked process is nobody's: it does nothing until the process between has ended.

The warm process has one thread, or a fork would leave locks that nobody holds; it logs nothing and
touches no device. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from liver_hpc.host.child import end_with_parent

READY = "ready"
MAX_ORDER_BYTES = 64 * 1024
MOST_DESCRIPTORS = 8

_EXIT_FAILED = 1
_GO = b"g"


@dataclass(frozen=True)
class Order:
    """What is to be forked.

    words: its command line, as others are to see it; the first ones are the interpreter's.
    arguments: what its `main` gets. environment: what differs from the warm process's. descriptors:
    names of variables, one for each descriptor that comes along after that of its log. mark: the
    name by which its tree is found, in place of the warm process's own mark, as long. group: it
    leads a process group.
    """

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    descriptors: tuple[str, ...]
    mark: str
    instead_of_mark: str
    group: bool

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Reply:
    """pid: of what was forked, a child of whoever asked; 0 where that was refused, and why."""

    pid: int = 0
    refused: str = ""


def serve(line: socket.socket, main: Callable[[list[str]], object]) -> NoReturn:
    """Says that this process is ready, and forks what it is asked for, until the line ends.

    main: what a forked process does with its arguments; it has ended once that returns or raises.
    """
    parent = os.getppid()
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of it
    line.send(READY.encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, MAX_ORDER_BYTES, MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        _fork(line, Order(**json.loads(data)), descriptors, parent, main)
        for descriptor in descriptors:
            os.close(descriptor)


def _answer(line: socket.socket, reply: Reply) -> None:
    line.send(json.dumps(asdict(reply)).encode())


def _fork(
    line: socket.socket,
    order: Order,
    descriptors: list[int],
    parent: int,
    main: Callable[[list[str]], object],
) -> None:
    """Forks, and answers. What is forked goes on only once whoever asked has been told of it; it
    ends where this process does before."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        _answer(line, Reply(refused=f"it has {threads} threads"))
        return
    told, tell = os.pipe()
    may_go, go = os.pipe()

    def child() -> NoReturn:
        for end in (told, tell, go):
            os.close(end)
        line.close()
        _child(order, descriptors, parent, may_go, main)

    # What comes before the child has set its own signals waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        between = os.fork()
        if between == 0:
            _fork_and_end(tell, child)
        os.waitpid(between, 0)  # from here on the child is the parent's
        os.write(tell, b"\n")
        pid = int(os.read(told, 32).strip() or b"0")
        _answer(line, Reply(pid, "" if pid else "it cannot fork a second time"))
        os.write(go, _GO)
    except OSError as error:
        _answer(line, Reply(refused=f"it cannot fork: {error.strerror}"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for end in (told, tell, may_go, go):
            os.close(end)


def _fork_and_end(tell: int, child: Callable[[], NoReturn]) -> NoReturn:
    """In the process between: it forks, says whom, and ends."""
    try:
        pid = os.fork()
        if pid == 0:
            child()
        os.write(tell, str(pid).encode())
    finally:
        os._exit(0)


def _child(
    order: Order,
    descriptors: list[int],
    parent: int,
    may_go: int,
    main: Callable[[list[str]], object],
) -> NoReturn:
    code = _EXIT_FAILED
    try:
        if os.read(may_go, 1) != _GO:  # the warm process has ended, and nobody knows of us
            os._exit(_EXIT_FAILED)
        os.close(may_go)
        # Not earlier: the end of the process between would have been the parent's.
        end_with_parent(parent)
        _become(order, descriptors)
        main(list(order.arguments))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else _EXIT_FAILED
    finally:  # nothing finds its way back into the warm process's loop
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _become(order: Order, descriptors: list[int]) -> None:
    """Makes this process what an executed one would be: group, output, environment, signals."""
    if order.group:
        os.setpgid(0, 0)
    log, *passed = descriptors
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.pop(order.instead_of_mark, None)
    os.environ.update(order.environment)
    os.environ[order.mark] = "1"
    for name, descriptor in zip(order.descriptors, passed, strict=True):
        os.environ[name] = str(descriptor)
        os.set_inheritable(descriptor, True)
    _show(order)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.enable()


def _show(order: Order) -> None:
    """Has /proc tell of this process what it is, and not what the warm process was.

    It shows the memory where the kernel once put command line and environment. What does not fit
    is cut off.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    first, end, environment, environment_end = map(int, fields[45:49])  # fields 48 to 51 of proc(5)
    line = b"".join(word.encode() + b"\0" for word in order.words)[: end - first - 1]
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, line, len(line))
    shown = ctypes.string_at(environment, environment_end - environment)
    old, new = f"{order.instead_of_mark}=".encode(), f"{order.mark}=".encode()
    at = shown.find(old)
    if at >= 0 and len(old) == len(new):
        ctypes.memmove(environment + at, new, len(new))
