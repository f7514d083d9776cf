"""The control channel: protocol messages over an authenticated TCP connection.

What is sent at once is a frame: its length and the number of its parts, of four bytes each; of
each part whose it is, two numbers (`Part`) and its length; the parts, each a message as JSON; and a
seal. Nothing that arrives is ever unpickled. Before the first frame both sides prove that they hold
the secret, from which the seals come (`rendezvous/handshake.py`). A server (`server.py`) that has
no room hangs up before its proof, and the client tries again.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import NamedTuple

from pydantic import ValidationError

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError, ProtocolError
from liver_hpc.host.process import start_thread
from liver_hpc.protocol.messages import AnyMessage, decode, encode
from liver_hpc.rendezvous.handshake import (
    CLIENT,
    SEAL_BYTES,
    SERVER,
    ChannelClosed,
    ChannelRefused,
    Seal,
    introduce,
)

__all__ = [
    "Channel",
    "ChannelClosed",
    "ChannelRefused",
    "Part",
    "connect",
]

MAX_MESSAGE_BYTES = 16 * 2**20
"""Of all messages of a frame."""
MOST_WAITING_BYTES = 4 * MAX_MESSAGE_BYTES
"""What may wait for a peer that does not read, where the sender does not."""
ITSELF = -1
"""Who has said a part, or is to be told it: not one of an agent's workers, but the peer."""
STALL_S = 30.0
"""The longest that a peer may stand still within a message, in either direction."""
UNHEARD_S = 10.0
"""So long nothing of what was sent may have come to the other machine. TCP's tries are twice as far
apart each time, the seventh 13 s behind the sixth: after a link was out for a while, whoever
connects anew is heard before who lives would count as silent."""

_HEAD = struct.Struct("!II")
_PART = struct.Struct("!qQQI")
_SAME_AGAIN = 2**32 - 1
"""In the place of a length: the message of the part before."""
_READ_BYTES = 2**16
_AGAIN_S = 0.1
TRY_S = 5.0
"""So long a client waits for the proof before it connects anew. A connection for which the kernel
over there has no room (net.core.somaxconn) stands here all the same, and its server, which speaks
first, never has it."""
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 10,  # seconds; then that many probes, so far apart
    socket.TCP_KEEPCNT: 4,
    socket.TCP_KEEPINTVL: 5,
}

_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """A message as it is sent. number: its own in its conversation (`conversation.py`), 0 for one
    that has none. heard: the number up to which the sender has taken what was sent to it. who: the
    worker whose conversation that is, by id, or ITSELF. Without data it only says what was heard.
    """

    data: bytes
    number: int = 0
    heard: int = 0
    who: int = ITSELF


class Channel:
    """One authenticated conversation; any thread may send, one thread at a time receives.

    peer: the other end in errors and logs, which may be set to a better name. key: a secret of this
    connection alone, which both ends know. speaker: which of them this one is, CLIENT or SERVER.
    """

    def __init__(self, connected: socket.socket, peer: str, key: bytes, speaker: bytes) -> None:
        _tune(connected)
        self.peer = peer
        self.key = key
        self._socket = connected
        self._seal = Seal(key, speaker)
        self._their_seal = Seal(key, CLIENT if speaker == SERVER else SERVER)
        self._state = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._came: deque[Part] = deque()
        self._unread = bytearray()  # what was read behind the frame before
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._writer: threading.Thread | None = None  # as long as something waits
        self._closed_because: str | None = None
        self._is_lent = False

    def fileno(self) -> int:
        """For a selector: readable when there is something to receive, also the end."""
        return self._socket.fileno()

    def send(self, message: AnyMessage) -> None:
        """Sends one message, whole; from any thread.

        Raises ChannelClosed, and ProtocolError for a message over MAX_MESSAGE_BYTES.
        """
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{message.type} to {self.peer}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES}"
            )
        self._write(lambda: self._frame([Part(data)]))

    def _write(self, made: Callable[[], bytes]) -> None:
        """made: called once it is this message's turn."""
        try:
            with self._writing:
                if self._writer is not None:
                    self._wait(made())
                else:
                    self._socket.sendall(made())
            return
        except OSError as error:
            reason = reason_of(error)
        self.close(reason)
        raise self._closed_error()

    def prove(self, proof: bytes) -> None:
        """A server's first words, before any message. Raises ChannelClosed."""
        self._write(lambda: proof)

    def post(self, parts: Sequence[Part]) -> None:
        """Sends parts without waiting for a peer that does not read: they wait for it then. Who
        receives from the channel is told of its end, nobody here. From any thread."""
        reason = ""
        for frame in _frames(parts):
            with self._writing:
                if self._closed_because is not None:
                    return
                data = self._frame(frame)
                if self._writer is None:
                    try:
                        sent = self._socket.send(data, socket.MSG_DONTWAIT)
                    except BlockingIOError:
                        sent = 0
                    except OSError as error:
                        sent, reason = len(data), reason_of(error)
                    data = data[sent:]
                if data:
                    try:
                        self._wait(data)
                    except LiverError as error:  # half of a frame may be sent
                        reason = str(error)
                if self._waiting_bytes > MOST_WAITING_BYTES:
                    reason = f"has not read {self._waiting_bytes} bytes"
            if reason:
                self.close(reason)

    def _frame(self, parts: Sequence[Part]) -> bytes:
        """Sealed, so in the order in which frames are sent."""
        heads, datas, before = [], [], None
        for data, number, heard, who in parts:
            length = _SAME_AGAIN if data and data is before else len(data)
            heads.append(_PART.pack(who, number, heard, length))
            if length != _SAME_AGAIN:
                datas.append(data)
            before = data
        body = b"".join(heads + datas)
        head = _HEAD.pack(len(body), len(parts))
        return head + body + self._seal.next(head, body)

    def _wait(self, data: bytes) -> None:
        """With the lock held: somebody else is to write it."""
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._writer is None:
            # It begins with the lock.
            self._writer = start_thread(self._write_what_waits, f"write-{self.peer}")

    def _write_what_waits(self) -> None:
        reason = ""
        while True:
            with self._writing:
                if reason or not self._waiting:
                    self._waiting.clear()
                    self._waiting_bytes, self._writer = 0, None
                    break
                data = self._waiting.popleft()
            try:
                self._socket.sendall(data)
            except OSError as error:
                reason = reason_of(error)
            with self._writing:
                self._waiting_bytes -= len(data)
        if reason:
            self.close(reason)

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message; None waits until there is one or the channel ends.

        Raises DeadlineError after `timeout_s`, and ChannelClosed at the end of the channel, which
        is also what a message that is none leads to.
        """
        while not self._came:
            self._came.extend(part for part in self.receive_parts(timeout_s) if part.data)
        return self.open(self._came.popleft())

    def open(self, part: Part) -> AnyMessage:
        """Its message. Raises ChannelClosed where it is none."""
        try:
            return decode(part.data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"not a message ({len(part.data)} bytes): {where}: {first['msg']}"
        _log.warning("closing the channel to %s: %s", self.peer, reason)
        self.close(reason)
        raise self._closed_error()

    def receive_parts(self, timeout_s: float | None = None) -> list[Part]:
        """The parts of the next frame, or those that are left of one. Raises as `receive`."""
        if self._came:
            left, self._came = list(self._came), deque()
            return left
        try:
            with self._reading:
                while (parts := self._next_frame()) is None:
                    self._read_more(timeout_s)
                return parts
        except (OSError, EOFError, ProtocolError) as error:
            reason = reason_of(error)
        self.close(reason)
        raise self._closed_error()

    def receive_ready(self) -> list[list[Part]]:
        """The parts of all frames that are there, without waiting for more. Raises ChannelClosed.

        For who waits for the descriptor of many, as a `Reader` does.
        """
        if self._closed_because is not None:
            raise self._closed_error()
        frames = [self.receive_parts()] if self._came else []
        try:
            with self._reading:
                with contextlib.suppress(BlockingIOError):
                    self._read_some(socket.MSG_DONTWAIT)
                while (parts := self._next_frame()) is not None:
                    frames.append(parts)
        except (OSError, EOFError, ProtocolError) as error:
            self.close(reason_of(error))
            if not frames:  # else the next call says it
                raise self._closed_error() from None
        return frames

    @property
    def within_frame(self) -> bool:
        """Whether a frame has begun to come, and has not come whole."""
        return bool(self._unread)

    def lend(self) -> None:
        """From now on another one looks at the descriptor, and calls `take_back` at its end; until
        then `close` leaves it. Raises ChannelClosed."""
        with self._state:
            if self._closed_because is not None:
                raise self._closed_error()
            self._is_lent = True

    def take_back(self) -> None:
        """Closes a channel for good that was lent, once nobody looks at its descriptor."""
        self._is_lent = False
        self.close()
        self._free()

    def close(self, reason: str = "closed on this side") -> None:
        """Ends the channel; a send or receive in another thread raises at once. Idempotent."""
        with self._state:
            if self._closed_because is not None:
                return
            self._closed_because = reason
            with contextlib.suppress(OSError):  # the peer may have ended it already
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._is_lent:  # who looks at it sees its end
                return
        self._free()

    def _free(self) -> None:
        """A descriptor may only go when no thread is in it: its number is soon somebody else's."""
        with self._writing:
            writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join()
        with self._reading, self._writing:
            self._socket.close()

    def _next_frame(self) -> list[Part] | None:
        """Its parts, once all of it is read. Raises ProtocolError for one that is none."""
        if len(self._unread) < _HEAD.size:
            return None
        head = bytes(self._unread[: _HEAD.size])
        size, count = _HEAD.unpack(head)
        heads_bytes = count * _PART.size
        fits = heads_bytes <= size <= MAX_MESSAGE_BYTES + heads_bytes
        if not fits or heads_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES}")
        end = _HEAD.size + size
        if len(self._unread) < end + SEAL_BYTES:
            return None
        with memoryview(self._unread) as read:
            body, seal = bytes(read[_HEAD.size : end]), bytes(read[end : end + SEAL_BYTES])
        del self._unread[: end + SEAL_BYTES]
        if not hmac.compare_digest(seal, self._their_seal.next(head, body)):
            reason = "a message that was changed, repeated or left out on its way"
            _log.warning("closing the channel to %s: %s", self.peer, reason)
            raise ProtocolError(reason)
        return list(_parts(body, count))

    def _read_more(self, timeout_s: float | None) -> None:
        """With as few calls as can be. timeout_s: for a frame's first bytes."""
        if self._closed_because is not None:
            raise self._closed_error()
        if not self._unread and timeout_s is not None and not wait([self._socket], timeout_s):
            raise DeadlineError(f"waited {timeout_s:g} s for a message from {self.peer}")
        try:
            self._read_some()
        except BlockingIOError:
            if self._unread:
                raise

    def _read_some(self, flags: int = 0) -> None:
        part = self._socket.recv(_READ_BYTES, flags)
        if not part:
            raise EOFError
        self._unread += part

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"connection to {self.peer}: {self._closed_because}")


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
            once = Deadline.after(SystemClock(), min(deadline.remaining_s(), TRY_S), waits_for)
            return _connect_once(address, secret, once)
        except (OSError, EOFError) as error:
            if deadline.expired():
                why = f"{reason_of(error)} before its proof"
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
    with contextlib.ExitStack() as unless_met:
        unless_met.enter_context(connected)
        try:
            key = introduce(secret, connected, deadline)
        except ChannelClosed as error:
            raise type(error)(f"{place}: {error}") from None
        unless_met.pop_all()
    return Channel(connected, deadline.waits_for, key, CLIENT)


def _frames(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Parts in the order given, as many together as a frame may have."""
    begun, num_bytes = 0, 0
    for at, part in enumerate(parts):
        if at > begun and num_bytes + len(part.data) > MAX_MESSAGE_BYTES:
            yield parts[begun:at]
            begun, num_bytes = at, 0
        num_bytes += len(part.data)
    yield parts[begun:]


def _parts(body: bytes, count: int) -> Iterator[Part]:
    """Of a frame whose seal is right."""
    at, data = count * _PART.size, b""
    for who, number, heard, length in _PART.iter_unpack(body[:at]):
        if length != _SAME_AGAIN:
            data = body[at : at + length]
            at += length
        yield Part(data, number, heard, who)


def reason_of(error: Exception) -> str:
    """Why a connection has ended, in words."""
    if isinstance(error, EOFError):
        return "closed by the other side"
    if isinstance(error, BlockingIOError):  # SO_SNDTIMEO or SO_RCVTIMEO ran out
        return f"stood still within a message for {STALL_S:g} s"
    return str(getattr(error, "strerror", None) or error)


def _tune(connected: socket.socket) -> None:
    """No Nagle delay, a dead host or way noticed in good time, no endless read or write."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_S * 1000))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(STALL_S), 0))
