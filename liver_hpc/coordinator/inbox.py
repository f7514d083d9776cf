"""The event loop's inbox: everything that happens to the coordinator comes through here.

What comes is an event of the run's core (`run/events.py`, `run/node_events.py`), news of a
connection, or a question whose sender waits for the answer.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol.messages import AgentHello, AnyMessage, FromOperator, Hello, Reply
from liver_hpc.rendezvous.base import Answer, Identity, Refusal
from liver_hpc.rendezvous.channel import Channel
from liver_hpc.run.events import StopSignalled
from liver_hpc.run.journal import JournalFailed, Written
from liver_hpc.run.node_events import EndNear, PoolEvent

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
