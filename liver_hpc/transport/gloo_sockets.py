"""Which connections are a group's: to prove that its members alone have them, and to end them.

gloo asks nobody who he is. Whoever connects first and says one of a pair's numbers is the peer. So
each member tells the others the ends of its connections over the run's store, which strangers do
not speak to: a connection is the group's where another member has its other end. Who else came is
shut out before a tensor crosses, and the group's port takes nobody any more.

gloo does not end what waits in a group either: its `abort` does nothing, and who waits in a
collective goes on only when a peer closes its end of a connection, or at the group's timeout. A
connection that is shut down fails at both ends, at once; who still waits then, `gloo_waits` frees.

And whoever counts the CPU time of what crosses has to ask for that of gloo's own threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from liver_hpc.errors import LiverError, TransferError
from liver_hpc.transport import gloo_waits

_DESCRIPTORS = "/proc/self/fd"
_THREADS = "/proc/self/task"
_CPU_CLOCK = 0b110
"""Of one thread of this process, in the kernel's numbers of clocks (its posix-timers.h)."""
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_SIGNED = 32
"""TCP_MD5SIG_EXT: packets of the named peers have to be signed under a key."""
_KEY_BYTES = 80

_TRIES = 10
"""So many times in a row somebody else begins to listen in the moment in which gloo does."""

_listening = threading.Lock()
_log = logging.getLogger(__name__)


class Socket(NamedTuple):
    """The inode tells it from another one that has its descriptor later."""

    descriptor: int
    inode: int


Address = tuple[str, int]
Ends = tuple[Address, Address]
"""Of a connection: this process's, the other side's."""

_connections: WeakKeyDictionary[Any, dict[Socket, int]] = WeakKeyDictionary()
"""By backend, with the rank of the member that each leads to."""
_threads: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""By backend, those of gloo that read and write its connections."""


class Watch:
    """Made before a group connects, it finds the group's connections afterwards."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._listeners: dict[Socket, Address] = {}
        self._threads: set[str] = set()

    def listen(self, create: Callable[[], list[Any]]) -> list[Any]:
        """gloo's devices as `create` makes them, each of which listens at a port of its own.

        Where another thread, such as one of NCCL's, began to listen meanwhile, nobody tells whose
        port is whose, and others are made. Raises TransferError where that is so again and again.
        """
        for _ in range(_TRIES):
            with _listening:
                before, threads = _sockets(), set(os.listdir(_THREADS))
                devices = create()
                self._listeners = _listeners(_sockets() - before)
                self._threads = set(os.listdir(_THREADS)) - threads
            if len(self._listeners) == len(devices):
                return devices
            del devices  # which ends their ports
        raise TransferError(
            f"{len(self._listeners)} sockets of this process began to listen as gloo opened its "
            f"own, {_TRIES} times in a row: its ports are not told from others'"
        )

    def end_waiting(self, size: int) -> None:
        """Has gloo come to an end that still connects a group of `size`: for a member that has told
        where it listens, and is gone, it waits five times the group's timeout, unless somebody
        connects in its place. What comes of it is nobody's."""
        for address in self._listeners.values():
            with contextlib.suppress(OSError):  # it listens no more, or takes nobody just now
                for rank in range(size):
                    with socket.create_connection(address, 1.0) as its:
                        its.sendall(struct.pack("=Q", rank))

    def prove(
        self,
        backend: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        check: Callable[[], None],
    ) -> None:
        """The group is connected, as far as gloo knows. Collective over its members. check: called
        while they try it; it may raise.

        Raises TransferError where a connection is no member's, DeadlineError or RuntimeError where
        a member does not tell of its own in time.
        """
        listening = set(self._listeners.values())
        own = (sorted(listening), sorted(_connected(_sockets() - self._before).values()))
        others = _told(store, rank, size, own, timeout).items()
        for listener in self._listeners:  # to which all members have connected
            _lock(listener)
        ends = _connected(_sockets() - self._before)
        theirs = {_address(each) for _, (listens, _) in others for each in listens}
        claimed = {
            (_address(far), _address(near)): other
            for other, (_, told) in others
            for near, far in told
        }
        found: dict[Socket, int] = {}
        strangers: list[Socket] = []
        for each, (near, far) in ends.items():
            if near not in listening and far not in theirs:
                continue  # another group's
            if (near, far) in claimed:
                found[each] = claimed[near, far]
            else:
                strangers.append(each)
        _connections[backend], _threads[backend] = found, self._threads
        if strangers:
            _log.warning("%d strangers at gloo's ports were shut out", len(strangers))
            _shut(strangers)
        wanted = (size - 1) * len(self._listeners)
        problem = "" if len(found) >= wanted else f"only {len(found)} lead to a member"
        if problem or (problem := _tried(backend, size, check)):
            shut_down(backend)
            raise TransferError(
                f"the {wanted} connections of a group over gloo: {problem}; {len(strangers)} "
                "strangers came meanwhile, and may have taken the place of a member"
            )


def shut_down(backend: Any) -> None:
    """Whoever waits in this group fails, here and at its peers; from any thread."""
    _shut(connections_of(backend))


def connections_of(backend: Any, member: int | None = None) -> Sequence[Socket]:
    """Those to its members, or to one, by its rank; none of another backend than gloo's."""
    its = _connections.get(backend, {})
    return [each for each, rank in its.items() if member in (None, rank)]


def cpu_s(backend: Any) -> float:
    """CPU seconds so far of gloo's threads for what crosses a group that stands, without those of
    whoever sends and waits; 0 of another backend than gloo's."""
    total_s = 0.0
    for thread in _threads.get(backend, ()):
        # One that has ended was another's, which had begun while the group connected.
        with contextlib.suppress(OSError):
            total_s += time.clock_gettime(~int(thread) << 3 | _CPU_CLOCK)
    return total_s


def are_closed(connections: Sequence[Socket]) -> bool:
    """Whether gloo has closed all of them, which were some: it reads and writes no memory then for
    what crossed them."""
    return bool(connections) and not any(map(_is_open, connections))


def _is_open(connection: Socket) -> bool:
    with _opened(connection) as its:
        return its is not None


def _shut(connections: Sequence[Socket]) -> None:
    for connection in connections:
        with _opened(connection) as its, contextlib.suppress(OSError):
            if its is not None:
                its.shutdown(socket.SHUT_RDWR)


def _tried(backend: Any, size: int, check: Callable[[], None]) -> str:
    """Sends a number over each connection, both ways; what is wrong, or empty. Where a stranger had
    come first, gloo has no use for the connection that is a member's."""
    connections = connections_of(backend)

    def ended() -> bool:
        check()
        return are_closed(connections)

    for _ in range(len(backend.options._devices)):  # it takes them in turns
        work = backend.alltoall_base(torch.empty(size), torch.empty(size), [], [])
        try:
            gloo_waits.wait_for(work, ended)
        except RuntimeError as error:
            return str(error)
        except LiverError as error:
            gloo_waits.keep([work], [backend])
            if isinstance(error, TransferError):
                return str(error)
            shut_down(backend)
            raise
    return ""


def _lock(listener: Socket) -> None:
    """Nobody connects there any more: packets have to be signed (RFC 2385) under a key that is
    thrown away. Where the kernel has no such signatures, gloo goes on to keep who comes."""
    with _opened(listener) as its, contextlib.suppress(OSError):
        if its is not None:
            anybody = struct.pack("=H126xBBHi", its.family, 1, 0, _KEY_BYTES, 0)
            its.setsockopt(socket.IPPROTO_TCP, _SIGNED, anybody + os.urandom(_KEY_BYTES))


def _told(store: Any, rank: int, size: int, own: Any, timeout: timedelta) -> dict[int, Any]:
    """What the other members tell of themselves, by rank."""
    store.set(f"ends/{rank}", json.dumps(own))
    keys = {other: f"ends/{other}" for other in range(size) if other != rank}
    store.wait([*keys.values()], timeout)
    return {other: json.loads(store.get(key)) for other, key in keys.items()}


def _address(told: Sequence[Any]) -> Address:
    return told[0], told[1]


def _sockets() -> set[Socket]:
    """All of this process."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # it was that of the listing, or is closed since
            kind, _, number = os.readlink(f"{_DESCRIPTORS}/{name}").partition(":")
            if kind == "socket":
                found.add(Socket(int(name), int(number.strip("[]"))))
    return found


def _listeners(sockets: set[Socket]) -> dict[Socket, Address]:
    found = {}
    for each in sockets:
        with _opened(each) as its:
            if its is not None and its.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[each] = _address(its.getsockname())
    return found


def _connected(sockets: set[Socket]) -> dict[Socket, Ends]:
    """Those that lead to a peer."""
    found = {}
    for each in sockets:
        with _opened(each) as its, contextlib.suppress(OSError):
            if its is not None:
                found[each] = (_address(its.getsockname()), _address(its.getpeername()))
    return found


@contextmanager
def _opened(each: Socket) -> Iterator[socket.socket | None]:
    """The socket under another descriptor; None where it is closed, or not of the internet."""
    number = -1
    try:
        number = os.dup(each.descriptor)
        its = socket.socket(fileno=number)
    except OSError:
        if number >= 0:
            os.close(number)  # of a file that has its place by now
        yield None
        return
    with its:
        is_same = os.fstat(its.fileno()).st_ino == each.inode
        yield its if is_same and its.family in _INTERNET else None
