"""The event loop's inbox: everything that happens to the coordinator comes through here."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol.messages import (
    AgentHello,
    AnyMessage,
    FromOperator,
    Hello,
    Reply,
    Warned,
    WorkerEnded,
)
from liver_hpc.rendezvous.base import Answer, Identity, Refusal
from liver_hpc.rendezvous.channel import Channel
from liver_hpc.run.node_events import PoolEvent

T = TypeVar("T")


class InboxClosed(LiverError):
    """The loop has ended; nobody will answer."""

    def __init__(self) -> None:
        super().__init__("the coordinator is shutting down")


@dataclass(frozen=True)
class Connected:
    """A worker's control channel is open."""

    channel: Channel
    hello: Hello


@dataclass(frozen=True)
class Received:
    """A message on a worker's control channel."""

    channel: Channel
    worker: int
    message: AnyMessage


@dataclass(frozen=True)
class Disconnected:
    """A worker's control channel has ended."""

    channel: Channel
    worker: int
    reason: str


@dataclass(frozen=True)
class AgentConnected:
    """An agent's own control channel is open."""

    channel: Channel
    hello: AgentHello


@dataclass(frozen=True)
class AgentWarned:
    """An agent got a signal that announces the end of its node."""

    channel: Channel
    message: Warned


@dataclass(frozen=True)
class AgentSaid:
    """An agent knows how one of its workers ended: not well."""

    channel: Channel
    message: WorkerEnded


@dataclass(frozen=True)
class AgentGone:
    """An agent's own control channel has ended."""

    channel: Channel
    agent: str
    reason: str


@dataclass(frozen=True)
class StopSignalled:
    """The coordinator's process was told to stop."""

    reason: str


@dataclass(frozen=True)
class PoolSaid:
    """The node pool has news."""

    event: PoolEvent


@dataclass(frozen=True)
class Question(Generic[T]):
    """An event whose sender waits for the loop's answer."""

    answer: Future[T] = field(default_factory=Future, init=False)


@dataclass(frozen=True)
class Met(Question[Answer | Refusal]):
    """An agent stands at the rendezvous."""

    identity: Identity


@dataclass(frozen=True)
class Asked(Question[Reply]):
    """An operator's request."""

    request: FromOperator


AgentEvent = AgentConnected | AgentWarned | AgentSaid | AgentGone
InboxEvent = (
    Connected | Received | Disconnected | AgentEvent | StopSignalled | PoolSaid | Met | Asked
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
        """Every question, asked before or after, is answered with an error. Idempotent."""
        with self._lock:
            self._closed = True
        while (event := self.get(0.0)) is not None:
            self.refuse(event)

    def refuse(self, event: InboxEvent) -> None:
        """Answers a question that the loop will not take up any more."""
        if isinstance(event, Question):
            event.answer.set_exception(InboxClosed())
