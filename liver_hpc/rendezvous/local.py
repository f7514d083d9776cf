"""The line between a worker and its node's agent: a socket that the worker has inherited.

What goes over it is a length, how it is to be passed on (`Way`, of one byte), and that many bytes:
a message for the coordinator, or for the worker, into which the agent does not look, or a request
to the store and its reply, which it passes on with those of other workers. Of a worker that fails
its error comes last. From the agent without bytes: the connection to the coordinator has broken.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import Future, InvalidStateError
from enum import IntEnum
from itertools import count
from multiprocessing.connection import wait
from typing import NamedTuple

from liver_hpc.errors import DeadlineError, StoreAway
from liver_hpc.protocol.messages import AnyMessage, StoreReply, StoreRequest, decode, encode
from liver_hpc.rendezvous.handshake import ChannelClosed

BOOTED = b"booted"
"""What a worker says first; else it says why it could not boot."""

_HEAD = struct.Struct("!IB")
_READ_BYTES = 2**18
_STALL_S = 30.0
"""The longest that a worker waits for an agent that does not read."""


class Way(IntEnum):
    """How the agent passes a message on."""

    ONCE = 0
    """It reaches the coordinator, or the one after it, once."""
    ASK = 1
    """A request to the store, with what other workers ask for just now; it may be lost."""
    LATER = 2
    """It may be lost, and take a while."""
    OWN = 3
    """Not at all: it is the error with which the worker ends, for the agent to tell of it."""


class Said(NamedTuple):
    data: bytes
    way: Way = Way.ONCE

    def packed(self) -> bytes:
        return _HEAD.pack(len(self.data), self.way) + self.data


class _Unpacked:
    """What was read so far."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data

    def next(self) -> Said | None:
        """The next whole one."""
        if len(self._data) < _HEAD.size:
            return None
        length, way = _HEAD.unpack_from(self._data)
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        data = bytes(self._data[_HEAD.size : end])
        del self._data[:end]
        return Said(data, Way(way))


class AgentsEnd:
    """Never waits for the worker. For a selector: readable when something has come."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unpacked = _Unpacked()
        self._to_send = bytearray()
        self.ended = False
        connected.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[Said]:
        """What has come. `ended` from when the worker's end is closed."""
        try:
            while not self.ended:
                data = self._socket.recv(_READ_BYTES)
                self._unpacked.add(data)
                self.ended = not data
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        return list(iter(self._unpacked.next, None))

    def write(self, data: bytes) -> bool:
        """Whether all is sent; else `flush` is to be called when the worker can take more."""
        self._to_send += Said(data).packed()
        return self.flush()

    def flush(self) -> bool:
        try:
            while self._to_send:
                del self._to_send[: self._socket.send(self._to_send)]
        except BlockingIOError:
            return False
        except OSError:  # the worker has ended
            self._to_send.clear()
        return True

    def close(self) -> None:
        self._socket.close()


class WorkersEnd:
    """Any thread sends and asks, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setblocking(True)
        timeout = struct.pack("ll", int(_STALL_S), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._unpacked = _Unpacked()
        self._sending = threading.Lock()
        self._numbers = count(1)
        self._asked: dict[int, Future[StoreReply]] = {}

    def send(self, message: AnyMessage, way: Way = Way.ONCE) -> None:
        """Raises ChannelClosed where the agent is gone, or takes nothing, for good then."""
        self.send_bytes(encode(message), way)

    def send_bytes(self, data: bytes, way: Way = Way.ONCE) -> None:
        try:
            with self._sending:
                self._socket.sendall(Said(data, way).packed())
        except OSError as error:
            with contextlib.suppress(OSError):  # half a message may have gone
                self._socket.shutdown(socket.SHUT_RDWR)
            raise ChannelClosed(f"the agent's line: {error.strerror or error}") from error

    def ask(self, request: StoreRequest) -> Future[StoreReply]:
        """The store's answer. It fails with StoreAway where the connection to the coordinator
        breaks meanwhile."""
        number = next(self._numbers)
        answer = self._asked[number] = Future()
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        try:
            self.send(request.model_copy(update={"number": number}), Way.ASK)
        except ChannelClosed as error:
            answer.set_exception(error)
        return answer

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message that is none of the store's. Raises DeadlineError, and ChannelClosed
        where the agent is gone."""
        late_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            data = self.receive_bytes(None if late_s is None else late_s - time.monotonic())
            if not data:
                self._fail_all()
                continue
            message = decode(data)
            if not isinstance(message, StoreReply):
                return message
            if (answer := self._asked.get(message.number)) is not None:
                with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                    answer.set_result(message)

    def receive_bytes(self, timeout_s: float | None = None) -> bytes:
        while (came := self._unpacked.next()) is None:
            if not wait([self._socket], timeout_s):
                raise DeadlineError("nothing has come from the agent")
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(f"the agent's line: {error.strerror or error}") from error
            if not data:
                raise ChannelClosed("the agent has closed its line")
            self._unpacked.add(data)
        return came.data

    def _fail_all(self) -> None:
        for answer in [*self._asked.values()]:
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(StoreAway("the connection to the coordinator has broken"))

    def close(self) -> None:
        self._socket.close()
