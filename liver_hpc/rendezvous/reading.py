"""Many channels that are read in one thread, as a coordinator's are to the agents of its nodes.

With a thread for each of them, most of the time went into passing Python's lock around.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable

from liver_hpc.host.process import start_thread
from liver_hpc.rendezvous.channel import STALL_S, Channel, ChannelClosed, Part

CLOSE_S = 5.0
_CLOSED = "the server closed"

log = logging.getLogger(__name__)


class Reader:
    """Tells in its thread what comes, frame by frame, and of each channel's end; then the channel
    is closed. Who stands still within a frame for STALL_S is hung up on, and holds nobody up.

    hear: may raise ChannelClosed where what came is no good. ended: with the reason. Raises
    LiverError where there is no thread for it.
    """

    def __init__(
        self,
        hear: Callable[[Channel, list[Part]], None],
        ended: Callable[[Channel, str], None],
    ) -> None:
        self._hear = hear
        self._ended = ended
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._new: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._late_s: dict[Channel, float] = {}  # within a frame: when it is to be whole, monotonic
        self._changing = threading.Lock()
        self._closing = False
        self._thread = start_thread(self._read_all, "reader")

    def add(self, channel: Channel) -> None:
        """From any thread. Raises ChannelClosed where it is closed already."""
        with self._changing:
            if self._closing:
                raise ChannelClosed(_CLOSED)
            channel.lend()
            self._new.put(channel)
            os.write(self._waker, b"\0")

    def close(self) -> None:
        """Closes all channels. Idempotent."""
        with self._changing:
            if not self._closing:
                self._closing = True
                os.write(self._waker, b"\0")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the reader of connections still runs after %g s", CLOSE_S)

    # ---- in the thread

    def _read_all(self) -> None:
        with self._selector:
            while not self._closing:
                for key, _ in self._selector.select(self._hang_up_on_late()):
                    if key.data is None:
                        self._take_new()
                    else:
                        self._read(key.data)
            self._take_new()
            for channel in [key.data for key in self._selector.get_map().values() if key.data]:
                channel.close(_CLOSED)
                self._drop(channel, _CLOSED)
        with self._changing:  # who closes this may still be writing to the second
            os.close(self._woken)
            os.close(self._waker)

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while not self._new.empty():
            channel = self._new.get()
            self._selector.register(channel, selectors.EVENT_READ, channel)
            self._read(channel)  # what came with its first message

    def _read(self, channel: Channel) -> None:
        try:
            for parts in channel.receive_ready():
                self._late_s.pop(channel, None)
                self._hear(channel, parts)
        except ChannelClosed as error:
            self._drop(channel, str(error))
            return
        if channel.within_frame:
            self._late_s.setdefault(channel, time.monotonic() + STALL_S)

    def _hang_up_on_late(self) -> float | None:
        """Seconds until the next one is late; None where nobody is within a frame."""
        now_s = time.monotonic()
        for channel in [each for each, late_s in self._late_s.items() if late_s <= now_s]:
            reason = f"stood still within a message for {STALL_S:g} s"
            channel.close(reason)
            self._drop(channel, f"connection to {channel.peer}: {reason}")
        return min((late_s - now_s for late_s in self._late_s.values()), default=None)

    def _drop(self, channel: Channel, reason: str) -> None:
        self._late_s.pop(channel, None)
        self._selector.unregister(channel)
        channel.take_back()
        self._ended(channel, reason)
