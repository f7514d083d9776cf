"""All that reaches the coordinator, and how it reaches workers and agents.

Everything that happens comes through the inbox: an event of the run's core (`run/events.py`), news
of a connection, or a question whose sender waits for the answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from liver_hpc.clock import Clock, SystemClock
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.base import Answer, Identity, Refusal
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.run.events import EndNear, JournalFailed, PoolEvent, StopSignalled
from liver_hpc.run.journal import Written
from liver_hpc.run.outcome import Outcome

log = logging.getLogger(__name__)

T = TypeVar("T")


class InboxClosed(LiverError):
    """The loop has ended; nobody will answer."""

    def __init__(self) -> None:
        super().__init__("the coordinator is shutting down")


@dataclass(frozen=True)
class Said:
    """A message on a worker's, or an agent's own, control channel; the first is its hello."""

    channel: Channel
    message: m.AnyMessage


@dataclass(frozen=True)
class Closed:
    """A channel on which somebody said hello has ended."""

    channel: Channel
    reason: str


@dataclass(frozen=True)
class Question(Generic[T]):
    """Somebody waits for the loop's answer."""

    answer: Future[T] = field(default_factory=Future, init=False)


@dataclass(frozen=True)
class Met(Question[Answer | Refusal]):
    """An agent stands at the rendezvous."""

    identity: Identity


@dataclass(frozen=True)
class Asked(Question[m.Reply]):
    """An operator's request."""

    request: m.FromOperator


InboxEvent = Said | Closed | Met | Asked | PoolEvent | StopSignalled | Written | JournalFailed


class Inbox:
    """Many threads put, the event loop gets."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._events: queue.SimpleQueue[InboxEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, event: InboxEvent) -> None:
        """From any thread or signal handler."""
        self._events.put(event)

    def ask(self, question: Question[T], timeout_s: float) -> T:
        """From any thread but the loop's: the loop's answer.

        Raises DeadlineError, InboxClosed, and what the loop answers with.
        """
        with self._lock:
            if self._closed:
                raise InboxClosed
            self._events.put(question)  # type: ignore[arg-type]  # Met and Asked are all there is
        try:
            return question.answer.result(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"waited {timeout_s:g} s for the coordinator's loop") from None

    def get(self, timeout_s: float) -> InboxEvent | None:
        """For the loop: the next event, or None after `timeout_s`."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def empty(self) -> bool:
        return self._events.empty()

    def close(self) -> None:
        """Questions get an error for an answer, before and after. Idempotent."""
        with self._lock:
            self._closed = True
        while (event := self.get(0.0)) is not None:
            if isinstance(event, Question):
                event.answer.set_exception(InboxClosed())


class Control:
    """How the process around a coordinator speaks to it, from any thread or signal handler, also
    before there is one: each start of the run in this process hears all that was said.

    steps_done: how far the run has come. outcome: how it ended, as soon as that is known.
    """

    def __init__(self) -> None:
        self.steps_done = 0
        self.outcome: Outcome | None = None
        self._said: list[StopSignalled | EndNear] = []
        self._inbox: Inbox | None = None

    def reach(self, inbox: Inbox) -> None:
        """From now on this inbox gets what is said; now what was said before. Of what is said
        meanwhile it may get two."""
        self._inbox = inbox
        for event in tuple(self._said):
            inbox.put(event)

    def stop(self, why: str) -> None:
        """The run is to stop at its next step boundary."""
        self._say(StopSignalled(why))

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The coordinator's job ends at `deadline_s` (epoch): state to disk, to go on in another
        job."""
        self._say(EndNear(reason, SystemClock().now_s(), deadline_s))

    def _say(self, event: StopSignalled | EndNear) -> None:
        self._said.append(event)
        if self._inbox is not None:
            self._inbox.put(event)


class ConnectionServer:
    """Serves each connection in its own thread; touches nothing of the loop's but its inbox."""

    def __init__(self, inbox: Inbox, store: StoreService, control_s: float) -> None:
        self._inbox = inbox
        self._store = store
        self._control_s = control_s
        self._settled = threading.Condition()
        self._unsettled = 0  # operators' requests whose replies are not sent yet

    def handle(self, channel: Channel) -> None:
        """Runs until the connection ends, which may raise ChannelClosed."""
        try:
            message = channel.receive(self._control_s)
        except DeadlineError as error:
            log.warning("%s: said nothing: %s", channel.peer, error)
            return
        while True:
            match message:
                case m.Hello():
                    self._listen(channel, message, f"worker {message.worker}")
                case m.AgentHello():
                    self._listen(channel, message, f"agent {message.agent}")
                case m.KeeperHello():  # its end and ours are all there is to know
                    channel.peer = f"keeper of job {message.job}"
                case m.StoreRequest():
                    channel.send(self._store.perform(message))
                case _ if isinstance(message, m.FromOperator):
                    self._reply(channel, message)
                case _:
                    log.warning("%s: unexpected %s", channel.peer, message.type)
                    return
            message = channel.receive()

    def _listen(self, channel: Channel, message: m.AnyMessage, name: str) -> NoReturn:
        channel.peer = name
        try:
            while True:
                self._inbox.put(Said(channel, message))
                message = channel.receive()
        except ChannelClosed as error:
            self._inbox.put(Closed(channel, str(error)))
            raise

    def _reply(self, channel: Channel, request: m.FromOperator) -> None:
        with self._settled:
            self._unsettled += 1
        try:
            try:
                reply = self._inbox.ask(Asked(request), self._control_s)
            except InboxClosed as error:
                channel.close(str(error))
                return
            except LiverError as error:
                reply = m.Reply(ok=False, text=str(error))
            channel.send(reply)
        finally:
            with self._settled:
                self._unsettled -= 1
                self._settled.notify_all()

    def settle(self) -> None:
        """Waits until the replies that the loop has given are sent. The inbox must be closed."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._unsettled == 0, self._control_s):
                log.warning("%d replies to operators could not be sent", self._unsettled)


Peer = int | str
"""A worker by its id, or an agent by its name."""


class WorkerRegistry:
    """The channels of workers and agents; used by the event loop alone.

    Who may join is the core's to say; here is only how they are reached, and when they were heard
    of last.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._channels: dict[Peer, Channel] = {}
        self._peers: dict[Channel, Peer] = {}
        self._heard_s: dict[Peer, float] = {}

    def add(self, peer: Peer, channel: Channel) -> bool:
        """False for one that has a channel already."""
        if peer in self._channels:
            return False
        self._channels[peer], self._peers[channel] = channel, peer
        self._heard_s[peer] = self._clock.now_s()
        return True

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._channels

    def peer_at(self, channel: Channel) -> Peer | None:
        """Who is at the other end, and heard of now; None where it is nobody's channel, or not any
        more."""
        peer = self._peers.get(channel)
        if peer is not None:
            self._heard_s[peer] = self._clock.now_s()
        return peer

    @property
    def workers(self) -> list[int]:
        """All that are connected."""
        return [peer for peer in self._channels if isinstance(peer, int)]

    def send(self, peers: Iterable[Peer], message: m.ToWorker | m.ToAgent) -> None:
        """To those that are still connected; a broken connection shows as its Closed."""
        for peer in peers:
            channel = self._channels.get(peer)
            if channel is None:
                continue
            try:
                channel.send(message)
            except ChannelClosed as error:
                log.warning("%s was not sent: %s", message.type, error)

    def drop(self, peer: Peer) -> None:
        """Closes a peer's channel, if it has one."""
        channel = self._channels.pop(peer, None)
        if channel is not None:
            del self._peers[channel], self._heard_s[peer]
            channel.close()

    def excuse_all(self) -> None:
        """Counts everybody as heard of now."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def silent_workers(self, heartbeat_s: float) -> list[int]:
        """Those without a sign of life for so long."""
        last_s = self._clock.now_s() - heartbeat_s
        return [worker for worker in self.workers if self._heard_s[worker] < last_s]
