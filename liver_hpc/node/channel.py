"""An agent's own control channel: a thread connects and listens, the agent's loop is woken."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from liver_hpc.errors import DeadlineError
from liver_hpc.host.lifeline import quiet_thread
from liver_hpc.protocol.messages import AgentHello, EndAgent, Warned, WorkerEnded
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect

_WAITS_FOR = "the coordinator's control channel"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorGone:
    """The channel has ended, or never came to be; nothing follows."""

    reason: str


class AgentChannel:
    """Opens with `hello`. Something to select on: readable while there is `news`.

    The listening thread takes no signals, so that they all come to the agent's main thread, and
    starts no process.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, hello: AgentHello, control_s: float
    ) -> None:
        self._address = address
        self._secret = secret
        self._hello = hello
        self._control_s = control_s
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # once it stands
        self._early: list[Warned | WorkerEnded] = []
        self._news: queue.SimpleQueue[EndAgent | CoordinatorGone] = queue.SimpleQueue()
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = quiet_thread(self._serve, "control")

    def fileno(self) -> int:
        return self._bell

    @property
    def stands(self) -> bool:
        """Whether the coordinator hears what is sent."""
        return self._channel is not None

    def news(self) -> Iterator[EndAgent | CoordinatorGone]:
        """All that has come since the last call; does not block."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while not self._news.empty():
            yield self._news.get()

    def send(self, message: Warned | WorkerEnded) -> None:
        """Sends as soon as the channel stands; an end of it shows in the news."""
        with self._lock:
            channel = self._channel
            if channel is None:
                self._early.append(message)
                return
        try:
            channel.send(message)
        except ChannelClosed as error:
            log.warning("the coordinator did not get %s: %s", message.type, error)

    def close(self) -> None:
        """Ends the channel; what was sent before still arrives. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channel = self._channel
        if channel is not None:
            channel.close()
            self._thread.join(self._control_s)
        os.close(self._bell)

    # ---- in the listening thread

    def _serve(self) -> None:
        reason = "its thread has failed"
        try:
            self._listen(connect(self._address, self._secret, self._control_s, _WAITS_FOR))
        except (ChannelClosed, DeadlineError) as error:
            reason = str(error)
        finally:
            self._channel = None
            self._tell(CoordinatorGone(reason))

    def _listen(self, channel: Channel) -> None:
        channel.send(self._hello)
        with self._lock:
            if self._closed:
                channel.close()
            for early in self._early:
                channel.send(early)
            self._channel = channel
        log.info("the channel stands")
        while True:
            message = channel.receive()
            if isinstance(message, EndAgent):
                self._tell(message)
            else:
                log.warning("%s: unexpected %s", channel.peer, message.type)

    def _tell(self, news: EndAgent | CoordinatorGone) -> None:
        self._news.put(news)
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._bell, 1)
