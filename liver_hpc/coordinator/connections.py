"""All that reaches the coordinator, and how it reaches workers and agents.

Everything that happens comes through the inbox: an event of the run's core (`run/events.py`), news
of a connection, or a question whose sender waits for the answer. Who calls is told apart by the
first message.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from liver_hpc.clock import Clock
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol.messages import (
    AgentHello,
    AnyMessage,
    DrainRequest,
    EndAgent,
    FromOperator,
    Hello,
    KeeperHello,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    StatusRequest,
    StopRequest,
    StoreRequest,
    ToWorker,
)
from liver_hpc.rendezvous.base import Answer, Identity, Refusal
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.run.events import EndNear, JournalFailed, PoolEvent, StopSignalled
from liver_hpc.run.journal import Written

log = logging.getLogger(__name__)

OPERATOR_REQUESTS = (StatusRequest, ResizeRequest, ReplaceRequest, DrainRequest, StopRequest)

T = TypeVar("T")


class InboxClosed(LiverError):
    """The loop has ended; nobody will answer."""

    def __init__(self) -> None:
        super().__init__("the coordinator is shutting down")


@dataclass(frozen=True)
class Opened:
    """A worker's, or an agent's own, control channel stands."""

    channel: Channel
    hello: Hello | AgentHello


@dataclass(frozen=True)
class Said:
    """A message on a channel that has been Opened."""

    channel: Channel
    message: AnyMessage


@dataclass(frozen=True)
class Closed:
    """A channel that has been Opened has ended."""

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
class Asked(Question[Reply]):
    """An operator's request."""

    request: FromOperator


InboxEvent = (
    Opened | Said | Closed | Met | Asked | PoolEvent | StopSignalled | Written | JournalFailed
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
        """Questions get an error for an answer, before and after, until `reopen`. What the
        process's signals have announced stays. Idempotent."""
        with self._lock:
            self._closed = True
        announced = []
        while (event := self.get(0.0)) is not None:
            if isinstance(event, Question):
                event.answer.set_exception(InboxClosed())
            elif isinstance(event, StopSignalled | EndNear):
                announced.append(event)
        for event in announced:
            self.put(event)

    def reopen(self) -> None:
        """For the next start in this process."""
        with self._lock:
            self._closed = False


class ConnectionServer:
    """Serves each connection in its own thread; touches nothing of the loop's but its inbox."""

    def __init__(self, inbox: Inbox, store: StoreService, control_s: float) -> None:
        self._inbox = inbox
        self._store = store
        self._control_s = control_s
        self._settled = threading.Condition()
        self._unsettled = 0  # operators' requests whose replies are not sent yet

    def handle(self, channel: Channel) -> None:
        """Runs until the connection ends."""
        try:
            first = channel.receive(self._control_s)
        except DeadlineError as error:
            log.warning("%s: said nothing: %s", channel.peer, error)
            return
        if isinstance(first, Hello):
            self._listen(channel, first, f"worker {first.worker}")
        elif isinstance(first, AgentHello):
            self._listen(channel, first, f"agent {first.agent}")
        elif isinstance(first, KeeperHello):
            channel.peer = f"keeper of job {first.job}"
            channel.receive()  # it says no more: its end and ours are all there is to know
        elif isinstance(first, StoreRequest):
            self._store.serve(channel, first)
        elif isinstance(first, OPERATOR_REQUESTS):
            self._serve_operator(channel, first)
        else:
            log.warning("%s: opened with %s", channel.peer, first.type)

    def _listen(self, channel: Channel, hello: Hello | AgentHello, name: str) -> None:
        channel.peer = name
        self._inbox.put(Opened(channel, hello))
        try:
            while True:
                self._inbox.put(Said(channel, channel.receive()))
        except ChannelClosed as error:
            self._inbox.put(Closed(channel, str(error)))

    def _serve_operator(self, channel: Channel, request: FromOperator) -> None:
        while True:
            with self._reply_due():
                try:
                    reply = self._inbox.ask(Asked(request), self._control_s)
                except InboxClosed:
                    return
                except LiverError as error:
                    reply = Reply(ok=False, text=str(error))
                channel.send(reply)
            following = channel.receive()
            if not isinstance(following, OPERATOR_REQUESTS):
                log.warning("%s: followed up with %s", channel.peer, following.type)
                return
            request = following

    def settle(self) -> None:
        """Waits until the replies that the loop has given are sent. The inbox must be closed."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._unsettled == 0, self._control_s):
                log.warning("%d replies to operators could not be sent", self._unsettled)

    @contextmanager
    def _reply_due(self) -> Iterator[None]:
        with self._settled:
            self._unsettled += 1
        try:
            yield
        finally:
            with self._settled:
                self._unsettled -= 1
                self._settled.notify_all()


class WorkerRegistry:
    """The channels of workers and agents; used by the event loop alone.

    Who may join is the core's to say; here is only how they are reached, and when a worker was
    heard of last.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[int, Channel] = {}
        self._agents: dict[str, Channel] = {}
        self._heard_s: dict[int, float] = {}
        self._at: dict[Channel, int] = {}

    def add_worker(self, worker: int, channel: Channel) -> None:
        self._workers[worker], self._at[channel] = channel, worker
        self._heard_s[worker] = self._clock.now_s()

    def add_agent(self, agent: str, channel: Channel) -> bool:
        """False for an agent that has a channel already."""
        return self._agents.setdefault(agent, channel) is channel

    def worker_at(self, channel: Channel) -> int | None:
        """The worker at the other end, which is heard of now; None where it is nobody's channel,
        or not any more."""
        worker = self._at.get(channel)
        if worker is not None:
            self._heard_s[worker] = self._clock.now_s()
        return worker

    def agent_at(self, channel: Channel) -> str | None:
        return next((a for a, known in self._agents.items() if known is channel), None)

    def has_agent(self, agent: str) -> bool:
        return agent in self._agents

    @property
    def workers(self) -> tuple[int, ...]:
        """All that are connected."""
        return tuple(self._workers)

    def send(self, workers: Iterable[int], message: ToWorker) -> None:
        """To those that are still connected; a broken connection shows as its Closed."""
        for worker in workers:
            channel = self._workers.get(worker)
            if channel is None:
                continue
            try:
                channel.send(message)
            except ChannelClosed as error:
                log.warning("worker %d did not get %s: %s", worker, message.type, error)

    def end_agent(self, agent: str, reason: str) -> None:
        """Asks an agent to end, if it listens."""
        channel = self._agents.get(agent)
        if channel is not None:
            try:
                channel.send(EndAgent(reason=reason))
            except ChannelClosed:
                del self._agents[agent]

    def drop_worker(self, worker: int) -> None:
        channel = self._workers.pop(worker, None)
        self._heard_s.pop(worker, None)
        if channel is not None:
            del self._at[channel]
            channel.close()

    def drop_agent(self, channel: Channel) -> None:
        agent = self.agent_at(channel)
        if agent is not None:
            del self._agents[agent]
        channel.close()

    def excuse_all(self) -> None:
        """Counts everybody as heard of now."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def silent(self, heartbeat_s: float) -> list[int]:
        """Workers without a sign of life for so long."""
        last_s = self._clock.now_s() - heartbeat_s
        return [worker for worker, heard_s in self._heard_s.items() if heard_s < last_s]
