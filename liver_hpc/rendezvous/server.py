"""The control channel's server: who connects has to prove the secret before it is heard."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.host.process import start_thread
from liver_hpc.rendezvous.channel import Channel, reason_of
from liver_hpc.rendezvous.handshake import (
    ANSWER_BYTES,
    PROOF_BYTES,
    SERVER,
    ChannelClosed,
    ChannelRefused,
    challenge,
    check_greeting,
    welcome,
)

HANDSHAKE_S = 5.0
"""What a stranger has to prove the secret in."""
TELL_S = 1.0
"""Strangers are told of in the log so often at most, so that they cannot fill it."""
MOST_STRANGERS = 512
"""So many may be about to prove the secret; one more takes the place of the first of them."""

_QUEUE = 4096
_AGAIN_S = 0.1
_CLOSE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Stranger:
    """Who has connected and proved nothing yet. late_s: when its time is over (monotonic)."""

    connected: socket.socket
    peer: str
    late_s: float
    challenged: bytes
    said: bytes = b""


class ControlServer:
    """Listens on `host` and runs `handle` for every authenticated channel in a thread of its own.

    A stranger, silent or talkative, is dropped after HANDSHAKE_S; it holds no thread, and
    nobody else up. A channel is closed when its `handle` returns, unless it says True: then
    somebody else has it. ChannelClosed may simply be let out of `handle`. Raises OSError, and
    LiverError where there is no thread to accept any.
    """

    def __init__(self, host: str, secret: bytes, handle: Callable[[Channel], bool | None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_QUEUE)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._secret = secret
        self._handle = handle
        self._closing = threading.Event()
        self._changing = threading.Lock()
        self._threads: dict[threading.Thread, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[_Stranger, None] = {}  # the first comer first
        self._turned_away = 0
        self._untold = 0
        self._tell_from_s = 0.0  # monotonic
        self._acceptor = start_thread(self._accept_all, f"accept-{self.address[1]}")

    def close(self) -> None:
        """Stops listening, closes every channel that has a handler, waits for these; idempotent.

        May be called from within a handler.
        """
        self._closing.set()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the acceptor
        end_s = time.monotonic() + _CLOSE_S
        self._acceptor.join(_CLOSE_S)
        with self._changing:
            threads = dict(self._threads)
        for channel in threads.values():
            channel.close("the server closed")
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
                if thread.is_alive():
                    _log.warning("handler %s still runs after %g s", thread.name, _CLOSE_S)

    # ---- in the acceptor's thread: strangers

    def _accept_all(self) -> None:
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in self._selector.select(self._drop_late()):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._strangers:  # it may have lost its place just now
                        self._hear(key.data)
            for stranger in self._strangers:
                stranger.connected.close()
        if self._untold:
            _log.warning("%d strangers were turned away in all", self._turned_away)

    def _drop_late(self) -> float | None:
        """Seconds until the next stranger is late; None without any."""
        for stranger in list(self._strangers):
            left_s = stranger.late_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._turn_away(stranger, f"no proof in {HANDSHAKE_S:g} s")
        return None

    def _accept(self) -> None:
        try:
            connected, address = self._listener.accept()
        except OSError as error:  # out of descriptors, or closing
            if not self._closing.is_set():
                _log.warning("accept on %s:%d: %s", *self.address, error.strerror)
                self._closing.wait(_AGAIN_S)
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)), "another one came")
        late_s = time.monotonic() + HANDSHAKE_S
        stranger = _Stranger(connected, f"{address[0]}:{address[1]}", late_s, challenge())
        self._strangers[stranger] = None
        self._selector.register(connected, selectors.EVENT_READ, stranger)
        connected.setblocking(False)
        with contextlib.suppress(OSError):  # the selector tells that it has gone
            connected.send(stranger.challenged)

    def _hear(self, stranger: _Stranger) -> None:
        """A client that no thread can be started for tries again."""
        try:
            part = stranger.connected.recv(ANSWER_BYTES - len(stranger.said))
            stranger.said += part
            if not part:
                raise EOFError
            check_greeting(stranger.said)
            if len(stranger.said) == ANSWER_BYTES:
                self._begin(stranger, *welcome(self._secret, stranger.challenged, stranger.said))
        except (ChannelClosed, OSError, EOFError, RuntimeError) as error:
            if isinstance(error, ChannelRefused):
                with contextlib.suppress(OSError):
                    stranger.connected.send(bytes(PROOF_BYTES))
            self._turn_away(stranger, reason_of(error))

    def _begin(self, stranger: _Stranger, proof: bytes, key: bytes) -> None:
        channel = Channel(stranger.connected, stranger.peer, key, SERVER)
        thread = threading.Thread(
            target=self._serve, args=(channel, proof), name=f"wire-{stranger.peer}", daemon=True
        )
        self._selector.unregister(stranger.connected)
        with self._changing:  # which the thread needs to end
            thread.start()
            self._threads[thread] = channel
        del self._strangers[stranger]

    def _turn_away(self, stranger: _Stranger, why: str) -> None:
        """The log has one line in TELL_S at most, with the number of those that it left out."""
        self._turned_away += 1
        now_s = time.monotonic()
        if now_s >= self._tell_from_s:
            more = f"; {self._untold} more since the last" if self._untold else ""
            _log.warning("stranger %s turned away: %s before its proof%s", stranger.peer, why, more)
            self._tell_from_s, self._untold = now_s + TELL_S, 0
        else:
            self._untold += 1
        del self._strangers[stranger]
        with contextlib.suppress(KeyError):
            self._selector.unregister(stranger.connected)
        stranger.connected.close()

    # ---- in a thread of the channel's own

    def _serve(self, channel: Channel, proof: bytes) -> None:
        is_kept: bool | None = False
        try:
            with contextlib.suppress(ChannelClosed):  # how a conversation usually ends
                channel.prove(proof)
                is_kept = self._handle(channel)
        finally:
            if not is_kept:
                channel.close()
            with self._changing:
                del self._threads[threading.current_thread()]
