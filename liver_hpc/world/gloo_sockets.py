"""Ends what waits in a group of gloo's, which gloo cannot: its `abort` does nothing, and who waits
in a collective goes on only when a peer closes its end of a connection, or at the group's timeout.
A connection that is shut down fails at both ends, at once.

gloo does not tell which connections are a group's. Each group listens at a port of its own, so what
was accepted there is its; and what this process has opened elsewhere while the group connected.
Where these are not as many as the group has peers, as another thread opened connections, too, none
are known.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_DESCRIPTORS = "/proc/self/fd"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_listening = threading.Lock()


class Socket(NamedTuple):
    """The inode tells it from another one that has its descriptor later."""

    descriptor: int
    inode: int


_connections: WeakKeyDictionary[Any, list[Socket]] = WeakKeyDictionary()
"""By backend."""


class Watch:
    """Made before a group connects, it finds the group's connections afterwards."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._ports: set[int] = set()

    def listen(self, create: Callable[[], list[Any]]) -> list[Any]:
        """gloo's devices as `create` makes them, each of which listens at a port."""
        with _listening:
            before = _sockets()
            devices = create()
            self._ports = _listening_ports(_sockets() - before)
        return devices

    def remember(self, backend: Any, count: int) -> None:
        """The group is connected, by so many connections."""
        now = _sockets()
        elsewhere = _listening_ports(now) - self._ports
        found = [each for each in now - self._before if _is_connected(each, elsewhere)]
        if len(found) == count:
            _connections[backend] = found


def shut_down(backend: Any) -> None:
    """Whoever waits in this group fails, here and at its peers; from any thread."""
    for connection in _connections.pop(backend, []):
        with _opened(connection) as its, contextlib.suppress(OSError):
            if its is not None:
                its.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[Socket]:
    """All of this process."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # it was that of the listing, or is closed since
            kind, _, number = os.readlink(f"{_DESCRIPTORS}/{name}").partition(":")
            if kind == "socket":
                found.add(Socket(int(name), int(number.strip("[]"))))
    return found


def _listening_ports(sockets: set[Socket]) -> set[int]:
    ports = set()
    for each in sockets:
        with _opened(each) as its:
            if its is not None and its.family in _INTERNET and _listens(its):
                ports.add(its.getsockname()[1])
    return ports


def _listens(its: socket.socket) -> bool:
    return bool(its.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_connected(each: Socket, elsewhere: set[int]) -> bool:
    """Whether it leads to a peer, and was not accepted at one of these ports."""
    with _opened(each) as its, contextlib.suppress(OSError):
        if its is not None and its.family in _INTERNET:
            its.getpeername()
            return its.getsockname()[1] not in elsewhere
    return False


@contextmanager
def _opened(each: Socket) -> Iterator[socket.socket | None]:
    """The socket under another descriptor; None where it is closed."""
    try:
        its = socket.socket(fileno=os.dup(each.descriptor))
    except OSError:
        yield None
        return
    with its:
        yield its if os.fstat(its.fileno()).st_ino == each.inode else None
