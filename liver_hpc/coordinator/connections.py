"""All that reaches the coordinator, and how it reaches workers and agents.

Everything that happens comes through the inbox: an event of the run's core (`run/events.py`), news
of a connection, or a question whose sender waits for the answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from liver_hpc.clock import Clock
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.base import Answer, Identity, Refusal
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, Part
from liver_hpc.rendezvous.conversation import Conversation
from liver_hpc.rendezvous.reading import Reader
from liver_hpc.run.events import EndNear, PoolEvent, PoolNote, StopSignalled
from liver_hpc.run.journal import JournalNews
from liver_hpc.run.outcome import Outcome

log = logging.getLogger(__name__)

T = TypeVar("T")


class InboxClosed(LiverError):
    """The loop has ended; nobody will answer."""

    def __init__(self) -> None:
        super().__init__("the coordinator is shutting down")


@dataclass(frozen=True)
class Called:
    """An agent is at the other end of a new connection."""

    channel: Channel
    calls: m.Calls


@dataclass(frozen=True)
class Said:
    """What came at once over the connection of an agent after that, and the messages in it; None
    for a part without one."""

    channel: Channel
    came: tuple[tuple[Part, m.AnyMessage | None], ...]


@dataclass(frozen=True)
class Closed:
    """The connection of an agent has ended."""

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


@dataclass(frozen=True)
class FilesDone:
    """Something has come of what workers have said of checkpoints."""


InboxEvent = (
    Called | Said | Closed | Met | Asked | FilesDone | PoolEvent | StopSignalled | JournalNews
)


class Inbox:
    """Many threads put, the event loop gets, until it is closed."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._events: queue.SimpleQueue[InboxEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closed = False

    def put(self, event: InboxEvent) -> None:
        """From any thread or signal handler."""
        self._events.put(event)

    def ask(self, question: Question[T], timeout_s: float) -> T:
        """From any thread but the loop's: the loop's answer.

        Raises DeadlineError, InboxClosed, and what the loop answers with.
        """
        with self._lock:
            if self.closed:
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
            self.closed = True
        while (event := self.get(0.0)) is not None:
            if isinstance(event, Question):
                event.answer.set_exception(InboxClosed())


class Control:
    """How the process around a coordinator speaks to it, from any thread or signal handler, also
    before there is one: each start of the run in this process hears all that was said.

    steps_done: how far the run has come. outcome: how it ended, as soon as that is known. turns:
    those of its loop, several a second; 0 while it does not turn, at a start and at the end.
    """

    def __init__(self) -> None:
        self.steps_done = self.turns = 0
        self.outcome: Outcome | None = None
        self._said: list[StopSignalled | EndNear] = []
        self._notes: deque[str] = deque()
        self._inbox: Inbox | None = None

    def reach(self, inbox: Inbox) -> None:
        """From now on this inbox gets what is said; now what was said before. Of what is said
        meanwhile it may get two."""
        self._inbox = inbox
        for event in tuple(self._said):
            inbox.put(event)
        self._pass_notes_on()

    def say(self, event: StopSignalled | EndNear) -> None:
        """The run is to stop, or its coordinator's job ends."""
        self._said.append(event)
        if self._inbox is not None:
            self._inbox.put(event)

    def note(self, text: str) -> None:
        """Something that an operator would want to see, once."""
        self._notes.append(text)
        self._pass_notes_on()

    def _pass_notes_on(self) -> None:
        if self._inbox is not None and not self._inbox.closed:  # else the next start shows them
            with suppress(IndexError):  # until there is none
                while True:
                    self._inbox.put(PoolNote(self._notes.popleft()))


class ConnectionServer:
    """Serves each connection in its own thread, those of agents in one for all; touches nothing of
    the loop's but its inbox."""

    def __init__(self, inbox: Inbox, store: StoreService, control_s: float) -> None:
        self._inbox = inbox
        self._store = store
        self._control_s = control_s
        self._settled = threading.Condition()
        self._unsettled = 0  # operators' requests whose replies are not sent yet
        self._agents = Reader(self._hear, lambda *ended: inbox.put(Closed(*ended)))

    def handle(self, channel: Channel) -> bool:
        """Runs until the connection ends, which may raise ChannelClosed; or until it is one of an
        agent, which others listen to: then True."""
        try:
            message = channel.receive(self._control_s)
        except DeadlineError as error:
            log.warning("%s: said nothing: %s", channel.peer, error)
            return False
        while True:
            match message:
                case m.Calls():
                    channel.peer = f"agent {message.agent}"
                    self._inbox.put(Called(channel, message))
                    try:
                        self._agents.add(channel)
                    except ChannelClosed as error:  # the loop, which answers it, was quicker
                        self._inbox.put(Closed(channel, str(error)))
                        raise
                    return True
                case m.KeeperHello():  # its end and ours are all there is to know
                    channel.peer = f"keeper of job {message.job}"
                case _ if isinstance(message, m.FromOperator):
                    self._reply(channel, message)
                case _:
                    log.warning("%s: unexpected %s", channel.peer, message.type)
                    return False
            message = channel.receive()

    def _hear(self, channel: Channel, parts: list[Part]) -> None:
        """What is for the store goes there from here."""
        came: list[tuple[Part, m.AnyMessage | None]] = []
        for part in parts:
            message = channel.open(part) if part.data else None
            if isinstance(message, m.StoreAsks):
                self._store.ask(channel, message)
            else:
                came.append((part, message))
        if came:
            self._inbox.put(Said(channel, tuple(came)))

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

    def close(self) -> None:
        """Ends the agents' connections; the server that calls `handle` must be closed."""
        self._agents.close()

    def settle(self) -> None:
        """Waits until the replies that the loop has given are sent. The inbox must be closed."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._unsettled == 0, self._control_s):
                log.warning("%d replies to operators could not be sent", self._unsettled)


Peer = int | str
"""A worker by its id, or an agent by its name."""


class PeerRegistry:
    """The conversations with agents and their workers; used by the event loop alone.

    Who may join is the core's to say; here is only how they are reached, and when they were heard
    of last. A worker is reached through an agent; one whose agent's connection has broken is away:
    what it is sent waits until that calls again. What is sent goes with the next `flush`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._conversations: dict[Peer, Conversation] = {}
        self._agents: dict[int, str] = {}  # of each worker; none of one whose agent has not called
        self._channels: dict[str, Channel] = {}
        self._at: dict[Channel, str] = {}
        self._heard_s: dict[Peer, float] = {}
        self._why_away: dict[Peer, str] = {}
        self._to_send: dict[str, list[Part]] = {}
        self._owed: set[Peer] = set()  # who is to be told what is safe

    def remember(self, peer: Peer, conversation: Conversation) -> None:
        """One that another coordinator has talked to, and that is away."""
        self._conversations[peer] = conversation
        self._lose(peer, "it has not called since this coordinator began")

    def connect(self, channel: Channel, calls: m.Calls, epoch: int) -> list[int]:
        """Goes on with an agent and its workers, or begins. A worker that is not known, and is
        expected, has been added before; another one is told to go. Returns the workers that have
        heard what is not known here: of another coordinator, whose journal lacks it."""
        agent = calls.agent
        own = self._conversations.setdefault(agent, Conversation())
        if (before := self._channels.pop(agent, None)) is not None:
            del self._at[before]
            before.close("it has called again")
        self._channels[agent], self._at[channel] = channel, agent
        known = {w: self._conversations[w] for w in calls.workers if w in self._conversations}
        heard = {worker: each.heard or 0 for worker, each in known.items()}
        answer = m.Hears(heard=own.heard or 0, epoch=epoch, workers=heard)
        parts = [Part(m.encode(answer))]
        lacking = [worker for worker, each in known.items() if each.lacks(calls.workers[worker])]
        for worker, conversation in known.items():
            self._agents[worker] = agent
            parts += conversation.resume(calls.workers[worker])
        for worker in calls.workers.keys() - known.keys():
            parts.append(_told_to_go(worker, reason := "it is not expected"))
            own.say(m.encode(m.EndWorker(worker=worker, reason=reason)))  # it may stand still
        parts += own.resume(calls.heard)
        peers: list[Peer] = [agent, *known]
        for peer in peers:
            self._heard_s[peer] = self._clock.now_s()
            self._why_away.pop(peer, None)
        self._to_send[agent] = parts
        self.flush()
        return lacking

    def add(self, worker: int, agent: str) -> None:
        """A worker that has said its first word, through this agent."""
        self._conversations[worker] = Conversation(worker)
        self._agents[worker] = agent
        self._heard_s[worker] = self._clock.now_s()

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._conversations

    def agent_at(self, channel: Channel) -> str | None:
        """Who is at the other end, and heard of now; None where it is nobody's channel, or not any
        more."""
        agent = self._at.get(channel)
        if agent is not None:
            self._heard_s[agent] = self._clock.now_s()
        return agent

    def take(self, peer: Peer, came: Part) -> bool:
        """Whether what came is new; the peer is heard of now. Raises ProtocolError where something
        before it is missing."""
        self._heard_s[peer] = self._clock.now_s()
        return self._conversations[peer].take(came)

    def is_safe(self, peer: Peer, number: int) -> None:
        """The peer need not keep what it has said up to this number; it is told in a while."""
        conversation = self._conversations.get(peer)
        if conversation is not None and conversation.is_safe(number):
            self._owed.add(peer)

    def tell_what_is_safe(self) -> None:
        """Also a sign of life to all agents."""
        for peer in self._owed:
            self._put(peer, self._conversations[peer].tell())
        self._owed.clear()
        for agent in self._channels:
            if agent not in self._to_send:
                self._put(agent, self._conversations[agent].tell())
        self.flush()

    @property
    def workers(self) -> list[int]:
        """All that are connected, or away."""
        return [peer for peer in self._conversations if isinstance(peer, int)]

    def lost(self, channel: Channel, reason: str) -> None:
        """A connection has ended: its agent is away from now on, and so are that one's workers."""
        agent = self._at.pop(channel, None)
        if agent is None:
            return
        del self._channels[agent]
        self._to_send.pop(agent, None)
        self._lose(agent, reason)
        self._lose_workers(agent, reason)

    def away(self) -> dict[Peer, str]:
        """Who is away, and why."""
        return dict(self._why_away)

    def away_s(self, peer: Peer) -> float:
        """For how long, since it was heard of last or excused."""
        return self._clock.now_s() - self._heard_s[peer]

    def send(self, peers: Iterable[Peer], message: m.ToWorker | m.ToAgent) -> None:
        """To those that are connected, and to those that are away once their agents call again."""
        data = m.encode(message)
        for peer in peers:
            if (conversation := self._conversations.get(peer)) is not None:
                self._put(peer, conversation.say(data))
                self._owed.discard(peer)  # it says what is safe, too

    def flush(self) -> None:
        """What is sent to the peers at one connection goes in one frame."""
        to_send, self._to_send = self._to_send, {}
        for agent, parts in to_send.items():
            self._channels[agent].post(parts)

    def turn_away(self, agent: str, worker: int, reason: str) -> None:
        """Tells a worker to end that is none of the run's, where its agent is connected."""
        if agent in self._channels:
            self._to_send.setdefault(agent, []).append(_told_to_go(worker, reason))

    def drop(self, peer: Peer, reason: str) -> None:
        """Tells a peer to end, and talks to it no more. A worker may not hear it, so its agent is
        told, too, as soon as that can be. The workers of an agent are away from then on."""
        if self._conversations.pop(peer, None) is None:
            return
        if isinstance(peer, int):
            agent = self._agents.pop(peer, "")
            self.turn_away(agent, peer, reason)
            self.send((agent,), m.EndWorker(worker=peer, reason=reason))
        elif (channel := self._channels.pop(peer, None)) is not None:
            del self._at[channel]
            channel.post([*self._to_send.pop(peer, []), Part(m.encode(m.Exit(reason=reason)))])
            channel.close()
            self._lose_workers(peer, reason)
        self._why_away.pop(peer, None)
        self._heard_s.pop(peer, None)
        self._owed.discard(peer)

    def excuse_all(self) -> None:
        """Counts everybody as heard of now."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def silent(self, heartbeat_s: float) -> list[Peer]:
        """Those that are connected, without a sign of life for so long; agents first."""
        last_s = self._clock.now_s() - heartbeat_s
        here: list[Peer] = [*self._channels]
        here += [worker for worker, its in self._agents.items() if its in self._channels]
        return [peer for peer in here if self._heard_s[peer] < last_s]

    def workers_of(self, agent: str) -> list[int]:
        return [worker for worker, its in self._agents.items() if its == agent]

    def _put(self, peer: Peer, part: Part) -> None:
        agent = peer if isinstance(peer, str) else self._agents.get(peer)
        if agent in self._channels:
            self._to_send.setdefault(agent, []).append(part)

    def _lose_workers(self, agent: str, reason: str) -> None:
        for worker in self.workers_of(agent):
            self._lose(worker, reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        self._why_away[peer] = reason
        self._heard_s[peer] = self._clock.now_s()


def _told_to_go(worker: int, reason: str) -> Part:
    return Part(m.encode(m.Exit(reason=reason)), who=worker)
