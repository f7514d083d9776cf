"""An authenticated TCP connection that carries messages of bytes, and its server.

A message is its length, of four bytes, and its bytes; nothing that arrives is ever unpickled.
Before the first one both sides prove that they hold the secret (`rendezvous/handshake.py`). A
server that has no room hangs up before its proof, and the client tries again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError
from liver_hpc.rendezvous.handshake import (
    CHALLENGE_BYTES,
    REFUSAL,
    Challenge,
    ChannelClosed,
    ChannelRefused,
    answer,
    check_greeting,
    check_proof,
)

__all__ = ["ChannelClosed", "ChannelRefused", "Wire", "WireServer", "dial"]

MAX_MESSAGE_BYTES = 16 * 2**20
STALL_S = 30.0
"""The longest that a peer may stand still within a message, in either direction."""
MOST_STRANGERS = 512
"""So many may be about to prove the secret; others wait in the kernel's queue."""
CROWDED_S = 1.0
"""What a stranger has for its proof while others wait for a place."""

_LENGTH = struct.Struct("!I")
_QUEUE = 4096
_AGAIN_S = 0.1
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 4
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class Wire:
    """One connection; `peer` names the other end in errors and logs and may be set anew."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        _tune(connected)
        self.peer = peer
        self._socket = connected
        self._state = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._closed_because: str | None = None

    def send(self, data: bytes) -> None:
        """Sends one message; from any thread. Raises ChannelClosed."""
        try:
            with self._writing:
                self._socket.sendall(_framed(data))
            return
        except OSError as error:
            reason = _reason(error)
        self.close(reason)
        raise self._closed_error()

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; None waits until there is one or the connection ends.

        Raises DeadlineError after `timeout_s` without a message, ChannelClosed at the end.
        """
        try:
            with self._reading:
                if not self._is_readable(timeout_s):
                    raise DeadlineError(f"waited {timeout_s:g} s for a message from {self.peer}")
                (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
                if size <= MAX_MESSAGE_BYTES:
                    return bytes(self._read(size))
            reason = f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES}"
        except (OSError, EOFError) as error:
            reason = _reason(error)
        self.close(reason)
        raise self._closed_error()

    def close(self, reason: str = "closed on this side") -> None:
        """Ends the connection; a send or receive in another thread raises at once. Idempotent."""
        with self._state:
            if self._closed_because is not None:
                return
            self._closed_because = reason
        with contextlib.suppress(OSError):  # the peer may have ended it already
            self._socket.shutdown(socket.SHUT_RDWR)
        # A descriptor may only go when no thread sits in it: its number is soon somebody else's.
        with self._reading, self._writing:
            self._socket.close()

    def _is_readable(self, timeout_s: float | None) -> bool:
        if self._closed_because is not None:
            raise self._closed_error()
        poll = select.poll()  # which takes no descriptor, and any number of one
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return data

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"connection to {self.peer}: {self._closed_because}")


class _Stranger:
    """A connection to a server that has yet to prove the secret. Nothing here blocks."""

    def __init__(self, connected: socket.socket, peer: str, secret: bytes) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.peer = peer
        self._challenge = Challenge(secret)

    def challenge(self) -> None:
        """Raises OSError when it has gone already."""
        self.socket.send(self._challenge.said)  # whole: nothing was sent before

    def hear(self) -> bytes | None:
        """Takes what has come: the server's proof in return for a good one, None before its end.

        Raises ChannelClosed.
        """
        try:
            part = self.socket.recv(self._challenge.wants_bytes)
            if not part:
                raise EOFError
            return self._challenge.hear(part)
        except BlockingIOError:
            return None
        except ChannelRefused:
            with contextlib.suppress(OSError):
                self.socket.send(_framed(REFUSAL))
            raise
        except (OSError, EOFError) as error:
            raise ChannelClosed(f"{_reason(error)} before its proof") from error


class WireServer:
    """Listens on `host` and runs `handle` for every authenticated wire in a thread of its own.

    A stranger, silent or talkative, holds a place for at most `handshake_timeout_s` and nobody
    else up; while others wait for a place, for CROWDED_S. When `handle` returns, its wire is
    closed.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        handle: Callable[[Wire], None],
        handshake_timeout_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_QUEUE)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._secret = secret
        self._handle = handle
        self._handshake_timeout_s = handshake_timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: dict[threading.Thread, Wire] = {}
        # Of the acceptor alone: who came when (monotonic), and until when nobody is let in.
        self._strangers: dict[_Stranger, float] = {}
        self._full_until_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"accept-{self.address[1]}", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stops listening, closes every wire and waits for the handlers; idempotent.

        May be called from within a handler.
        """
        self._closing.set()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the acceptor
        end_s = time.monotonic() + _CLOSE_S
        self._acceptor.join(_CLOSE_S)
        with self._lock:
            threads = dict(self._threads)
        for wire in threads.values():
            wire.close("the server closed")
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
                if thread.is_alive():
                    _log.warning("handler %s still runs after %g s", thread.name, _CLOSE_S)

    # ---- in the acceptor's thread

    def _accept_all(self) -> None:
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in self._selector.select(self._make_room()):
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.data)
            for stranger in [*self._strangers]:
                self._turn_away(stranger, "the server closed")

    def _make_room(self) -> float | None:
        """Drops strangers whose time is over; seconds until there is something to do here again.

        Listens for more where there is a place for one.
        """
        now_s, limit_s = time.monotonic(), self._handshake_timeout_s
        if self._is_full(now_s):
            limit_s = min(limit_s, CROWDED_S)
        for stranger in [s for s, came_s in self._strangers.items() if came_s + limit_s <= now_s]:
            self._turn_away(stranger, f"no proof of the secret in {limit_s:g} s")
        full = self._is_full(now_s)
        # No listening socket is ever writable, but its end is told all the same.
        wanted = selectors.EVENT_WRITE if full else selectors.EVENT_READ
        self._selector.modify(self._listener, wanted)
        left_s = [came_s + limit_s - now_s for came_s in self._strangers.values()]
        return min(left_s + [_AGAIN_S] * full, default=None)

    def _is_full(self, now_s: float) -> bool:
        return len(self._strangers) >= MOST_STRANGERS or now_s < self._full_until_s

    def _accept(self) -> None:
        try:
            connected, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, or closing
            if not self._closing.is_set():
                _log.warning("accept on %s:%d: %s", *self.address, error.strerror)
                self._full_until_s = time.monotonic() + _AGAIN_S
            return
        stranger = _Stranger(connected, f"{address[0]}:{address[1]}", self._secret)
        try:
            stranger.challenge()
            self._selector.register(connected, selectors.EVENT_READ, stranger)
            self._strangers[stranger] = time.monotonic()
        except OSError as error:
            self._turn_away(stranger, str(error))

    def _hear(self, stranger: _Stranger) -> None:
        """A client that no thread can be started for tries again."""
        try:
            proof = stranger.hear()
            if proof is None:
                return
            self._forget(stranger)
            wire = Wire(stranger.socket, stranger.peer)
            thread = threading.Thread(
                target=self._serve, args=(wire, proof), name=f"wire-{wire.peer}", daemon=True
            )
            with self._lock:  # which the thread needs to end
                thread.start()
                self._threads[thread] = wire
        except (ChannelClosed, OSError, RuntimeError) as error:
            self._turn_away(stranger, str(error))

    def _turn_away(self, stranger: _Stranger, why: str) -> None:
        _log.warning("stranger %s turned away: %s", stranger.peer, why)
        self._forget(stranger)
        stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        if self._strangers.pop(stranger, None) is not None:
            self._selector.unregister(stranger.socket)

    # ---- in a thread of the wire's own

    def _serve(self, wire: Wire, proof: bytes) -> None:
        try:
            with contextlib.suppress(ChannelClosed):  # how a conversation usually ends
                wire.send(proof)
                self._handle(wire)
        finally:
            wire.close()
            with self._lock:
                del self._threads[threading.current_thread()]


def dial(address: tuple[str, int], secret: bytes, timeout_s: float, waits_for: str) -> Wire:
    """Connects to a WireServer, both sides proving the secret; tries again where it has no room.

    Raises ChannelClosed when nobody listens there or who does is no WireServer, ChannelRefused when
    the secrets differ, and DeadlineError when it took longer than `timeout_s`.
    """
    deadline = Deadline.after(SystemClock(), timeout_s, waits_for)
    wires: list[Wire] = []
    failures: list[str] = []

    def has_dialled() -> bool:
        try:
            wires.append(_dial_once(address, secret, deadline))
        except (OSError, EOFError) as error:
            failures.append(_reason(error))
        return bool(wires)

    try:
        poll_until(has_dialled, deadline, _AGAIN_S)
    except DeadlineError as error:
        raise DeadlineError(f"{error}: {failures[-1]} before its proof") from None
    return wires[0]


def _dial_once(address: tuple[str, int], secret: bytes, deadline: Deadline) -> Wire:
    """Raises OSError or EOFError when the server hung up before its proof, or time ran out."""
    place = f"{deadline.waits_for} at {address[0]}:{address[1]}"
    try:
        connected = socket.create_connection(address, timeout=_left_s(deadline))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(f"{place}: {error.strerror or error}") from error
    with contextlib.ExitStack() as unproven:
        unproven.enter_context(connected)
        try:
            _introduce(connected, secret, deadline)
        except ChannelClosed as error:
            raise type(error)(f"{place}: {error}") from None
        wire = Wire(connected, deadline.waits_for)
        unproven.pop_all()
    return wire


def _introduce(connected: socket.socket, secret: bytes, deadline: Deadline) -> None:
    """The client's side of the handshake."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            connected.settimeout(_left_s(deadline))
            part = connected.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
            if size == CHALLENGE_BYTES:
                check_greeting(data)
        return data

    said, wanted = answer(secret, read(CHALLENGE_BYTES))
    connected.sendall(said)
    check_proof(read(_LENGTH.size + len(wanted)), _framed(wanted))


def _left_s(deadline: Deadline) -> float:
    """For a socket, to which 0 means that it does not wait at all."""
    return max(deadline.remaining_s(), 1e-3)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _reason(error: OSError | EOFError) -> str:
    if isinstance(error, EOFError):
        return "closed by the other side"
    if isinstance(error, BlockingIOError):  # SO_SNDTIMEO or SO_RCVTIMEO ran out
        return f"stood still within a message for {STALL_S:g} s"
    return str(error.strerror or error)


def _tune(connected: socket.socket) -> None:
    """No Nagle delay, a dead host noticed within half a minute, no endless read or write."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    stall = struct.pack("ll", int(STALL_S), 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
