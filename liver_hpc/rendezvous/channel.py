"""The control channel: protocol messages as JSON over an authenticated wire, never pickled."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic import ValidationError

from liver_hpc.errors import ProtocolError
from liver_hpc.protocol.messages import AnyMessage, decode, encode
from liver_hpc.rendezvous.wire import (
    MAX_MESSAGE_BYTES,
    ChannelClosed,
    ChannelRefused,
    Wire,
    WireServer,
    dial,
)

__all__ = ["Channel", "ChannelClosed", "ChannelRefused", "ControlServer", "connect"]

_log = logging.getLogger(__name__)


class Channel:
    """One authenticated conversation; any thread may send, one thread at a time receives."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @property
    def peer(self) -> str:
        """Who is at the other end, for errors and logs; may be set to a better name."""
        return self._wire.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._wire.peer = name

    def send(self, message: AnyMessage) -> None:
        """Sends one message, whole; from any thread.

        Raises ChannelClosed, and ProtocolError for a message over MAX_MESSAGE_BYTES.
        """
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{message.type} to {self.peer}: {len(data)} bytes, at most {MAX_MESSAGE_BYTES}"
            )
        self._wire.send(data)

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message; None waits until there is one or the channel ends.

        Raises DeadlineError after `timeout_s`, and ChannelClosed at the end of the channel, which
        is also what a message that is none leads to.
        """
        data = self._wire.receive(timeout_s)
        try:
            return decode(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"not a message ({len(data)} bytes): {where}: {first['msg']}"
        _log.warning("closing the channel to %s: %s", self.peer, reason)
        self._wire.close(reason)
        raise ChannelClosed(f"connection to {self.peer}: {reason}")

    def close(self) -> None:
        """Ends the channel; a receive in another thread raises ChannelClosed at once."""
        self._wire.close()


class ControlServer(WireServer):
    """Runs `handle` for every authenticated channel, each in a thread of its own.

    `handshake_timeout_s` limits how long a connection may take to prove the secret. A channel is
    closed when its `handle` returns; ChannelClosed may simply be let out of `handle`.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        handle: Callable[[Channel], None],
        handshake_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(host, secret, lambda wire: handle(Channel(wire)), handshake_timeout_s)


def connect(address: tuple[str, int], secret: bytes, timeout_s: float, waits_for: str) -> Channel:
    """Opens an authenticated channel to a ControlServer; `waits_for` names it in errors.

    Raises ChannelClosed when nobody listens there, ChannelRefused when the secrets differ, and
    DeadlineError when it took longer than `timeout_s`.
    """
    return Channel(dial(address, secret, timeout_s, waits_for))
