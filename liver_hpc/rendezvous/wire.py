"""An authenticated TCP connection that carries messages of bytes, and its server.

Framing and the mutual challenge are `multiprocessing.connection`'s; only `send_bytes` and
`recv_bytes` are used, so that nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError

MAX_MESSAGE_BYTES = 16 * 2**20
STALL_S = 30.0
"""The longest that a peer may stand still within a message, in either direction."""

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 4
_MAX_PENDING_HANDSHAKES = 128
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class ChannelClosed(LiverError):
    """The connection has ended: closed on either side, broken, or closed for bad input."""


class ChannelRefused(ChannelClosed):
    """One side could not prove that it holds the run's secret."""


class Wire:
    """One connection; `peer` names the other end in errors and logs and may be set anew."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        _tune(connected)
        self.peer = peer
        self._socket = connected
        # Connection wants a descriptor of its own; the socket object stays for shutdown().
        self._connection: Connection = Connection(os.dup(connected.fileno()))
        self._state = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._closed_because: str | None = None

    def send(self, data: bytes) -> None:
        """Sends one message; from any thread. Raises ChannelClosed."""
        try:
            with self._writing:
                self._connection.send_bytes(data)
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
                if not self._connection.poll(timeout_s):
                    raise DeadlineError(f"waited {timeout_s:g} s for a message from {self.peer}")
                return self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except EOFError:
            reason = "closed by the other side"
        except OSError as error:
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
            self._connection.close()
            self._socket.close()

    def challenge(self, secret: bytes) -> None:
        """The server's half of the mutual proof. Raises ChannelRefused or ChannelClosed."""
        self._prove(secret, (deliver_challenge, answer_challenge))

    def answer(self, secret: bytes) -> None:
        """The client's half of the mutual proof. Raises ChannelRefused or ChannelClosed."""
        self._prove(secret, (answer_challenge, deliver_challenge))

    def _prove(self, secret: bytes, steps: tuple[Callable[[Connection, bytes], None], ...]) -> None:
        try:
            with self._reading, self._writing:
                for step in steps:
                    step(self._connection, secret)
            return
        except (AuthenticationError, AssertionError, ValueError):
            # Python 3.11 asserts that the peer's first message is a challenge.
            refused, reason = True, "the two sides do not hold the same secret"
        except EOFError:
            refused, reason = False, "closed by the other side during the proof of the secret"
        except OSError as error:
            refused, reason = False, _reason(error)
        self.close(reason)
        raise ChannelRefused(f"{self.peer}: {reason}") if refused else self._closed_error()

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"connection to {self.peer}: {self._closed_because}")


class WireServer:
    """Listens on `host` and runs `handle` for every authenticated wire in a thread of its own.

    A stranger, silent or talkative, holds one thread for at most `handshake_timeout_s` and
    nobody else up. When `handle` returns, its wire is closed.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        handle: Callable[[Wire], None],
        handshake_timeout_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._secret = secret
        self._handle = handle
        self._handshake_timeout_s = handshake_timeout_s
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pending: dict[Wire, float] = {}  # wire -> end of its handshake, monotonic
        self._threads: dict[threading.Thread, Wire] = {}
        self._acceptor = threading.Thread(
            target=self._accept, name=f"accept-{self.address[1]}", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stops listening, closes every wire and waits for the handlers; idempotent.

        May be called from within a handler.
        """
        self._closing.set()
        with contextlib.suppress(OSError):  # closed before
            self._wake_writer.send(b"x")
        end_s = time.monotonic() + _CLOSE_S
        if self._acceptor is not threading.current_thread():
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

    def _accept(self) -> None:
        with (
            self._listener,
            self._wake_reader,
            self._wake_writer,
            selectors.DefaultSelector() as selector,
        ):
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select(self._expire())
                try:
                    connected, address = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:  # out of descriptors, or the peer has gone already
                    _log.warning("accept on %s:%d: %s", *self.address, error.strerror)
                    self._closing.wait(0.05)
                    continue
                self._welcome(connected, f"{address[0]}:{address[1]}")

    def _welcome(self, connected: socket.socket, peer: str) -> None:
        try:
            wire = Wire(connected, peer)
        except OSError as error:
            _log.warning("connection from %s: %s", peer, error.strerror)
            connected.close()
            return
        thread = threading.Thread(target=self._serve, args=(wire,), name=f"wire-{peer}")
        thread.daemon = True
        with self._lock:
            crowded = len(self._pending) >= _MAX_PENDING_HANDSHAKES
            oldest = min(self._pending, key=self._pending.__getitem__) if crowded else None
            self._pending[wire] = time.monotonic() + self._handshake_timeout_s
            self._threads[thread] = wire
        if oldest is not None:
            oldest.close("too many unfinished handshakes")
        thread.start()

    def _expire(self) -> float | None:
        """Closes handshakes that are overdue; seconds until the next one is."""
        now_s = time.monotonic()
        with self._lock:
            overdue = [wire for wire, end_s in self._pending.items() if end_s <= now_s]
            remaining = [end_s - now_s for end_s in self._pending.values() if end_s > now_s]
            for wire in overdue:
                del self._pending[wire]
        for wire in overdue:
            wire.close(f"no proof of the secret within {self._handshake_timeout_s:g} s")
        return min(remaining, default=None)

    def _serve(self, wire: Wire) -> None:
        try:
            try:
                wire.challenge(self._secret)
            except ChannelClosed as error:
                _log.warning("stranger turned away: %s", error)
                return
            finally:
                with self._lock:
                    self._pending.pop(wire, None)
            with contextlib.suppress(ChannelClosed):  # how a conversation usually ends
                self._handle(wire)
        finally:
            wire.close()
            with self._lock:
                self._threads.pop(threading.current_thread(), None)


def dial(address: tuple[str, int], secret: bytes, timeout_s: float, waits_for: str) -> Wire:
    """Connects to a WireServer, both sides proving the secret.

    Raises ChannelClosed when nobody listens there, ChannelRefused when the secrets differ, and
    DeadlineError when it took longer than `timeout_s`.
    """
    deadline = Deadline.after(SystemClock(), timeout_s, waits_for)
    place = f"{waits_for} at {address[0]}:{address[1]}"
    try:
        connected = socket.create_connection(address, timeout=timeout_s)
    except TimeoutError as error:
        raise deadline.error() from error
    except OSError as error:
        raise ChannelClosed(f"{place}: {error.strerror or error}") from error
    connected.setblocking(True)
    wire = Wire(connected, waits_for)
    timer = threading.Timer(deadline.remaining_s(), wire.close, ["handshake deadline"])
    timer.daemon = True
    timer.start()
    try:
        wire.answer(secret)
    except ChannelRefused:
        raise
    except ChannelClosed as error:
        if deadline.expired():
            raise deadline.error() from error
        raise
    finally:
        timer.cancel()
    return wire


def _reason(error: OSError) -> str:
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
