"""The control channel: protocol messages over an authenticated TCP connection, and its server.

A message is its length, of four bytes, and its JSON; nothing that arrives is ever unpickled.
Before the first one both sides prove that they hold the secret (`rendezvous/handshake.py`). A
server that has no room hangs up before its proof, and the client tries again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial

from pydantic import ValidationError

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, ProtocolError
from liver_hpc.protocol.messages import AnyMessage, decode, encode
from liver_hpc.rendezvous.handshake import ChannelClosed, ChannelRefused, introduce, welcome

__all__ = ["Channel", "ChannelClosed", "ChannelRefused", "ControlServer", "connect"]

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


class Channel:
    """One authenticated conversation; any thread may send, one thread at a time receives.

    peer: the other end in errors and logs, which may be set to a better name. key: a secret of this
    connection alone, which both ends know once each has been proved.
    """

    key = b""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        _tune(connected)
        self.peer = peer
        self._socket = connected
        self._state = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._closed_because: str | None = None

    def begin(self, handshake: Callable[[socket.socket], bytes]) -> None:
        """The handshake, before all else; raises what that does, and leaves the channel open."""
        with self._reading, self._writing:
            self.key = handshake(self._socket)
            self._socket.settimeout(None)

    def send(self, message: AnyMessage) -> None:
        """Sends one message, whole; from any thread.

        Raises ChannelClosed, and ProtocolError for a message over MAX_MESSAGE_BYTES.
        """
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{message.type} to {self.peer}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES}"
            )
        try:
            with self._writing:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            return
        except OSError as error:
            reason = _reason(error)
        self.close(reason)
        raise self._closed_error()

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message; None waits until there is one or the channel ends.

        Raises DeadlineError after `timeout_s`, and ChannelClosed at the end of the channel, which
        is also what a message that is none leads to.
        """
        try:
            with self._reading:
                if not self._is_readable(timeout_s):
                    raise DeadlineError(f"waited {timeout_s:g} s for a message from {self.peer}")
                (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
                data = bytes(self._read(size)) if size <= MAX_MESSAGE_BYTES else None
            if data is not None:
                return decode(data)
            reason = f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES}"
        except (OSError, EOFError) as error:
            reason = _reason(error)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"not a message ({size} bytes): {where}: {first['msg']}"
            _log.warning("closing the channel to %s: %s", self.peer, reason)
        self.close(reason)
        raise self._closed_error()

    def close(self, reason: str = "closed on this side") -> None:
        """Ends the channel; a send or receive in another thread raises at once. Idempotent."""
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


class ControlServer:
    """Listens on `host` and runs `handle` for every authenticated channel in a thread of its own.

    A stranger, silent or talkative, holds a place for at most `handshake_timeout_s` and nobody
    else up; while others wait for a place, for CROWDED_S. A channel is closed when its `handle`
    returns; ChannelClosed may simply be let out of `handle`.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        handle: Callable[[Channel], None],
        handshake_timeout_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_QUEUE)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._secret = secret
        self._handle = handle
        self._handshake_timeout_s = handshake_timeout_s
        self._closing = threading.Event()
        self._changed = threading.Condition()
        """Held to see or change the two below."""
        self._threads: dict[threading.Thread, Channel] = {}
        self._strangers: dict[Channel, float] = {}  # since when (monotonic), the first comer first
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"accept-{self.address[1]}", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Stops listening, closes every channel and waits for the handlers; idempotent.

        May be called from within a handler.
        """
        self._closing.set()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the acceptor
        with self._changed:
            self._changed.notify_all()
        end_s = time.monotonic() + _CLOSE_S
        self._acceptor.join(_CLOSE_S)
        with self._changed:
            threads = dict(self._threads)
        for channel in threads.values():
            channel.close("the server closed")
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
                if thread.is_alive():
                    _log.warning("handler %s still runs after %g s", thread.name, _CLOSE_S)

    def _accept_all(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    self._make_room()
                    connected, address = self._listener.accept()
                except OSError as error:  # out of descriptors, or closing
                    if not self._closing.is_set():
                        _log.warning("accept on %s:%d: %s", *self.address, error.strerror)
                        self._closing.wait(_AGAIN_S)
                else:
                    self._begin(connected, f"{address[0]}:{address[1]}")

    def _make_room(self) -> None:
        """Returns once there is a place for one more, which the first comer may have to give."""
        with self._changed:
            while len(self._strangers) >= MOST_STRANGERS and not self._closing.is_set():
                first, since_s = next(iter(self._strangers.items()))
                left_s = since_s + CROWDED_S - time.monotonic()
                if left_s <= 0:
                    del self._strangers[first]
                    break
                self._changed.wait(left_s)
            else:
                return
        first.close(f"no proof of the secret in {CROWDED_S:g} s")  # which its thread holds

    def _begin(self, connected: socket.socket, peer: str) -> None:
        """A client that no thread can be started for tries again."""
        try:
            channel = Channel(connected, peer)
            thread = threading.Thread(
                target=self._serve, args=(channel,), name=f"wire-{peer}", daemon=True
            )
            with self._changed:  # which the thread needs to end
                thread.start()
                self._threads[thread] = channel
                self._strangers[channel] = time.monotonic()
        except (OSError, RuntimeError) as error:
            _log.warning("stranger %s turned away: %s", peer, error)
            connected.close()

    # ---- in a thread of the channel's own

    def _serve(self, channel: Channel) -> None:
        try:
            if self._admits(channel):
                with contextlib.suppress(ChannelClosed):  # how a conversation usually ends
                    self._handle(channel)
        finally:
            channel.close()
            with self._changed:
                del self._threads[threading.current_thread()]

    def _admits(self, channel: Channel) -> bool:
        """Whether the stranger proves that it holds the secret, while it has a place."""
        waits_for = f"{channel.peer}'s proof of the secret"
        deadline = Deadline.after(SystemClock(), self._handshake_timeout_s, waits_for)
        try:
            channel.begin(
                partial(welcome, self._secret, deadline, partial(self._give_back, channel))
            )
            return True
        except (ChannelClosed, OSError, EOFError) as error:
            why = str(error) if isinstance(error, ChannelClosed) else _reason(error)
            _log.warning("stranger %s turned away: %s before its proof", channel.peer, why)
            with contextlib.suppress(ChannelClosed):
                self._give_back(channel)
            return False

    def _give_back(self, channel: Channel) -> None:
        """Ends a stranger's stay; raises ChannelClosed where its place was taken from it."""
        with self._changed:
            if self._strangers.pop(channel, None) is None:
                raise ChannelClosed("others waited for its place")
            self._changed.notify_all()


def connect(address: tuple[str, int], secret: bytes, timeout_s: float, waits_for: str) -> Channel:
    """Opens a channel to a ControlServer, which `waits_for` names in errors; tries again where that
    has no room.

    Raises ChannelClosed when nobody listens there or who does is no ControlServer, ChannelRefused
    when the secrets differ, and DeadlineError when it took longer than `timeout_s`.
    """
    deadline = Deadline.after(SystemClock(), timeout_s, waits_for)
    pause = threading.Event()
    while True:
        try:
            return _connect_once(address, secret, deadline)
        except (OSError, EOFError) as error:
            if deadline.expired():
                why = f"{_reason(error)} before its proof"
                raise DeadlineError(f"{deadline.error()}: {why}") from None
        pause.wait(min(_AGAIN_S, deadline.remaining_s()))


def _connect_once(address: tuple[str, int], secret: bytes, deadline: Deadline) -> Channel:
    """Raises OSError or EOFError when the server hung up before its proof, or time ran out."""
    place = f"{deadline.waits_for} at {address[0]}:{address[1]}"
    try:
        connected = socket.create_connection(address, timeout=max(deadline.remaining_s(), 1e-3))
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(f"{place}: {error.strerror or error}") from error
    channel = Channel(connected, deadline.waits_for)
    try:
        channel.begin(partial(introduce, secret, deadline))
    except ChannelClosed as error:
        channel.close()
        raise type(error)(f"{place}: {error}") from None
    except (OSError, EOFError):
        channel.close()
        raise
    return channel


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
