"""What a worker or an agent and its coordinator say to each other, which outlives connections.

Each end numbers what it sends, and keeps it until the other one has said that it is safe there. A
connection that breaks is made again, and what may have been lost is said again: each message is
taken once, and in order. The one who calls is the worker or the agent (`Line`); on the other end
may be another coordinator by then, which knows from the run's journal what was said.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from liver_hpc.clock import Clock, Deadline
from liver_hpc.errors import DeadlineError, LiverError, ProtocolError
from liver_hpc.protocol.messages import AnyMessage, Calls, Exit, Hears
from liver_hpc.rendezvous.channel import (
    Channel,
    ChannelClosed,
    ChannelRefused,
    Numbered,
    connect,
)
from liver_hpc.run.directory import CoordinatorAddress, RunDirectory

LOOK_S = 5.0
"""So often who hears nothing looks whether there is another coordinator."""
_AGAIN_S = 0.2


class Conversation:
    """One end. Any thread may send; without a connection, what is sent is kept.

    heard: the number of the other end's last message that was taken before; None where that is not
    known, and the first number that comes is right. said: what this end has sent before.
    """

    def __init__(self, heard: int | None = 0, said: Iterable[AnyMessage] = ()) -> None:
        self.heard = heard
        self._safe = heard or 0
        self._kept = deque(enumerate(said, start=1))
        self._last = len(self._kept)
        self._lock = threading.RLock()
        self._channel: Channel | None = None

    def send(self, message: AnyMessage) -> None:
        """Sends it now, or when there is a connection. Raises ProtocolError for one that is too
        long."""
        with self._lock:
            self._kept.append((self._last + 1, message))
            try:
                self._write(message, self._last + 1)
            except ProtocolError:
                self._kept.pop()
                raise
            self._last += 1

    def tell(self, message: AnyMessage) -> None:
        """Sends what may be lost; nothing where there is no connection."""
        with self._lock:
            self._write(message, 0)

    def resume(self, channel: Channel, heard: int) -> None:
        """Goes on over another connection, whose other end has taken all up to `heard`."""
        with self._lock:
            self._channel = channel
            for number, message in tuple(self._kept):
                if number > heard:
                    self._write(message, number)

    def take(self, came: Numbered) -> bool:
        """Whether what came is new. Raises ProtocolError where something before it is missing."""
        with self._lock:
            while self._kept and self._kept[0][0] <= came.heard:
                self._kept.popleft()
            if came.number == 0:
                return True
            if self.heard is not None:
                if came.number <= self.heard:
                    return False
                if came.number != self.heard + 1:
                    raise ProtocolError(f"wanted message {self.heard + 1}, got {came.number}")
            self.heard = came.number
            return True

    def is_safe(self, number: int) -> bool:
        """What was taken up to here need not be kept at the other end, which is told with the next
        message; whether that is news."""
        with self._lock:
            news = number > self._safe
            self._safe = max(self._safe, number)
        return news

    def _write(self, message: AnyMessage, number: int) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message, number, self._safe)
            except ChannelClosed:  # who receives from it finds out why
                self._channel = None


class Line:
    """A caller's end: a worker's or an agent's. Any thread may send, one receives, which makes the
    connection again where it breaks.

    was_open: whether a coordinator has ever answered. call: what a connection begins with, from the
    number of what was heard and the newest coordinator's. coordinator_s: how long it goes on
    without a coordinator.
    """

    def __init__(
        self,
        run: RunDirectory,
        secret: bytes,
        call: Callable[[int, int], Calls],
        clock: Clock,
        control_s: float,
        coordinator_s: float,
    ) -> None:
        self.was_open = False
        self._run = run
        self._secret = secret
        self._call = call
        self._clock = clock
        self._control_s = control_s
        self._coordinator_s = coordinator_s
        self._conversation = Conversation()
        self._epoch = 0
        self._channel: Channel | None = None
        self._closing = threading.Event()
        self._told: Exit | None = None
        self._look_at_s = 0.0

    def open(self, address: tuple[str, int]) -> None:
        """Calls the coordinator for the first time, or the one after it. Raises ChannelClosed,
        ChannelRefused."""
        try:
            self._connect(address, self._control_s)
        except ChannelRefused:
            raise
        except (ChannelClosed, DeadlineError) as error:
            self._call_again(error)

    def send(self, message: AnyMessage) -> None:
        """It reaches the coordinator, or the one after it, once."""
        self._conversation.send(message)

    def tell(self, message: AnyMessage) -> None:
        """It may be lost."""
        self._conversation.tell(message)

    def receive(self, timeout_s: float | None = None) -> AnyMessage:
        """The next message; None waits until there is one or no coordinator any more.

        Raises DeadlineError after `timeout_s`, not counting what a new connection takes, and
        ChannelClosed where no coordinator has come for `coordinator_s`, the run has ended, or this
        end was closed.
        """
        limit_s = LOOK_S if timeout_s is None else timeout_s
        while True:
            if self._told is not None:
                return self._told
            assert self._channel is not None, "open comes first"
            try:
                came = self._channel.receive_numbered(limit_s)
                if self._conversation.take(came) and not isinstance(came.message, Hears):
                    self._conversation.is_safe(came.number)
                    return came.message
            except ChannelClosed as error:
                self._call_again(error)
            except DeadlineError:
                self._look_for_another()
                if timeout_s is not None:
                    raise

    def close(self) -> None:
        """Idempotent; from any thread."""
        self._closing.set()
        if self._channel is not None:
            self._channel.close()

    # ---- in the thread that receives

    def _look_for_another(self) -> None:
        """A coordinator that stands still keeps its connections; another one is in the file."""
        if self._clock.now_s() < self._look_at_s:
            return
        self._look_at_s = self._clock.now_s() + LOOK_S
        found = self._find()
        if found is not None and found.epoch > self._epoch:
            assert self._channel is not None
            self._channel.close(f"coordinator {found.epoch} has taken over")

    def _find(self) -> CoordinatorAddress | None:
        try:
            return self._run.coordinator()
        except (LiverError, OSError):  # a file system that does not answer now
            return None

    def _call_again(self, lost: LiverError) -> None:
        limit = Deadline.after(self._clock, self._coordinator_s, "a coordinator")
        why = lost
        while not self._closing.is_set():
            found = self._find()
            if found is not None and found.epoch >= self._epoch:
                try:
                    left_s = max(min(limit.remaining_s(), self._control_s), _AGAIN_S)
                    self._connect((found.host, found.port), left_s)
                    return
                except ChannelRefused:
                    raise
                except (ChannelClosed, DeadlineError) as error:
                    why = error
            if self._run.last_outcome() is not None:
                raise ChannelClosed(f"the run has ended: {lost}")
            if limit.expired():
                raise ChannelClosed(f"{limit.error()} after {lost}; the last: {why}")
            self._closing.wait(_AGAIN_S)
        raise ChannelClosed(str(lost))

    def _connect(self, address: tuple[str, int], limit_s: float) -> None:
        """Raises ChannelClosed, ChannelRefused, DeadlineError."""
        deadline = Deadline.after(self._clock, limit_s, "the coordinator's control channel")
        channel = connect(address, self._secret, limit_s, deadline.waits_for)
        try:
            channel.send(self._call(self._conversation.heard or 0, self._epoch))
            answer = channel.receive(deadline.remaining_s())
        except (ChannelClosed, DeadlineError):
            channel.close()
            raise
        if isinstance(answer, Exit):  # it wants nothing of this caller any more
            self._told = answer
        elif not isinstance(answer, Hears) or answer.epoch < self._epoch:
            channel.close("it is no coordinator, or not the newest")
            raise ChannelClosed(f"{channel.peer} at {address[0]}:{address[1]}: it said {answer}")
        else:
            self._epoch, self.was_open = answer.epoch, True
        self._channel = channel
        if self._closing.is_set():
            channel.close()
        if isinstance(answer, Hears):
            self._conversation.resume(channel, answer.heard)
