"""All that reaches the coordinator, and how it reaches workers and agents.

Everything that happens comes through the inbox: an event of the run's core (`run/events.py`), news
of a connection, or a question whose sender waits for the answer.
"""

from __future__ import annotations

import contextlib
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
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, Numbered
from liver_hpc.rendezvous.conversation import Conversation
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
class Called:
    """A worker or an agent is at the other end of a new connection."""

    channel: Channel
    calls: m.Calls


@dataclass(frozen=True)
class Said:
    """What came over the connection of a worker or an agent after that."""

    channel: Channel
    came: Numbered


@dataclass(frozen=True)
class Closed:
    """The connection of a worker or an agent has ended."""

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


InboxEvent = (
    Called | Said | Closed | Met | Asked | PoolEvent | StopSignalled | Written | JournalFailed
)


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
                case m.Calls():
                    self._listen(channel, message)
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

    def _listen(self, channel: Channel, calls: m.Calls) -> NoReturn:
        channel.peer = _name(peer_of(calls))
        self._inbox.put(Called(channel, calls))
        try:
            while True:
                self._inbox.put(Said(channel, channel.receive_numbered()))
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


def peer_of(calls: m.Calls) -> Peer:
    return calls.agent if calls.worker is None else calls.worker


def _name(peer: Peer) -> str:
    return f"worker {peer}" if isinstance(peer, int) else f"agent {peer}"


class PeerRegistry:
    """The conversations with workers and agents; used by the event loop alone.

    Who may join is the core's to say; here is only how they are reached, and when they were heard
    of last. One whose connection has broken is away: what it is sent waits until it calls again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._conversations: dict[Peer, Conversation] = {}
        self._channels: dict[Peer, Channel] = {}
        self._peers: dict[Channel, Peer] = {}
        self._heard_s: dict[Peer, float] = {}
        self._away: dict[Peer, str] = {}
        self._owed: dict[Peer, Conversation] = {}  # who is to be told what is safe

    def remember(self, peer: Peer, conversation: Conversation) -> None:
        """One that another coordinator has talked to, and that is away."""
        self._conversations[peer] = conversation
        self._lose(peer, "it has not called since this coordinator began")

    def connect(self, peer: Peer, channel: Channel, heard: int, epoch: int) -> None:
        """Goes on with a peer, or begins; `heard` is what that has taken."""
        conversation = self._conversations.setdefault(peer, Conversation())
        if (before := self._channels.pop(peer, None)) is not None:
            del self._peers[before]
            before.close("it has called again")
        self._away.pop(peer, None)
        self._channels[peer], self._peers[channel] = channel, peer
        self._heard_s[peer] = self._clock.now_s()
        with contextlib.suppress(ChannelClosed):  # which its Closed tells
            channel.send(m.Hears(heard=conversation.heard or 0, epoch=epoch))
        conversation.resume(channel, heard)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._conversations

    def peer_at(self, channel: Channel) -> Peer | None:
        """Who is at the other end, and heard of now; None where it is nobody's channel, or not any
        more."""
        peer = self._peers.get(channel)
        if peer is not None:
            self._heard_s[peer] = self._clock.now_s()
        return peer

    def take(self, peer: Peer, came: Numbered) -> bool:
        """Whether what came is new. Raises ProtocolError where something before it is missing."""
        return self._conversations[peer].take(came)

    def is_safe(self, peer: Peer, number: int) -> None:
        """The peer need not keep what it has said up to this number; it is told in a while."""
        conversation = self._conversations.get(peer)
        if conversation is not None and conversation.is_safe(number):
            self._owed[peer] = conversation

    def tell_what_is_safe(self, epoch: int) -> None:
        for conversation in self._owed.values():
            conversation.tell(m.Hears(heard=conversation.heard or 0, epoch=epoch))
        self._owed.clear()

    @property
    def workers(self) -> list[int]:
        """All that are connected, or away."""
        return [peer for peer in self._conversations if isinstance(peer, int)]

    def lost(self, channel: Channel, reason: str) -> Peer | None:
        """A connection has ended: whose it was, who is away from now on."""
        peer = self._peers.pop(channel, None)
        if peer is not None:
            del self._channels[peer]
            self._lose(peer, reason)
        return peer

    def away(self) -> dict[Peer, str]:
        """Who is away, and why."""
        return dict(self._away)

    def away_s(self, peer: Peer) -> float:
        """For how long, since it was heard of last or excused."""
        return self._clock.now_s() - self._heard_s[peer]

    def send(self, peers: Iterable[Peer], message: m.ToWorker | m.ToAgent) -> None:
        """To those that are connected, and to those that are away once they call again."""
        for peer in peers:
            if (conversation := self._conversations.get(peer)) is not None:
                conversation.send(message)

    def drop(self, peer: Peer, reason: str) -> None:
        """Tells a peer to end, and talks to it no more."""
        conversation = self._conversations.pop(peer, None)
        if conversation is None:
            return
        channel = self._channels.pop(peer, None)
        if channel is not None:
            del self._peers[channel]
            conversation.tell(m.Exit(reason=reason))
            channel.close()
        self._away.pop(peer, None)
        self._heard_s.pop(peer, None)
        self._owed.pop(peer, None)

    def excuse_all(self) -> None:
        """Counts everybody as heard of now."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def silent_workers(self, heartbeat_s: float) -> list[int]:
        """Those that are connected, without a sign of life for so long."""
        last_s = self._clock.now_s() - heartbeat_s
        here = (peer for peer in self._channels if isinstance(peer, int))
        return [worker for worker in here if self._heard_s[worker] < last_s]

    def _lose(self, peer: Peer, reason: str) -> None:
        self._away[peer] = reason
        self._heard_s[peer] = self._clock.now_s()
