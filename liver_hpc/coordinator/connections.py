"""Who is calling: worker, agent, operator or store client, told apart by the first message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from liver_hpc.coordinator.inbox import (
    AgentConnected,
    AgentGone,
    AgentSaid,
    AgentWarned,
    Asked,
    Connected,
    Disconnected,
    Inbox,
    InboxClosed,
    Received,
)
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.protocol.messages import (
    AgentHello,
    DrainRequest,
    FromOperator,
    Hello,
    KeeperHello,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    StatusRequest,
    StopRequest,
    StoreRequest,
    Warned,
    WorkerEnded,
)
from liver_hpc.rendezvous.channel import Channel, ChannelClosed

log = logging.getLogger(__name__)

OPERATOR_REQUESTS = (StatusRequest, ResizeRequest, ReplaceRequest, DrainRequest, StopRequest)


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
            self._serve_worker(channel, first)
        elif isinstance(first, AgentHello):
            self._serve_agent(channel, first)
        elif isinstance(first, KeeperHello):
            channel.peer = f"keeper of job {first.job}"
            channel.receive()  # it says no more: its end and ours are all there is to know
        elif isinstance(first, StoreRequest):
            self._store.serve(channel, first)
        elif isinstance(first, OPERATOR_REQUESTS):
            self._serve_operator(channel, first)
        else:
            log.warning("%s: opened with %s", channel.peer, first.type)

    def _serve_worker(self, channel: Channel, hello: Hello) -> None:
        worker = hello.worker
        channel.peer = f"worker {worker}"
        self._inbox.put(Connected(channel, hello))
        try:
            while True:
                self._inbox.put(Received(channel, worker, channel.receive()))
        except ChannelClosed as error:
            self._inbox.put(Disconnected(channel, worker, str(error)))

    def _serve_agent(self, channel: Channel, hello: AgentHello) -> None:
        channel.peer = f"agent {hello.agent}"
        self._inbox.put(AgentConnected(channel, hello))
        reason = ""
        try:
            while not reason:
                message = channel.receive()
                if isinstance(message, Warned) and message.agent == hello.agent:
                    self._inbox.put(AgentWarned(channel, message))
                elif isinstance(message, WorkerEnded) and message.agent == hello.agent:
                    self._inbox.put(AgentSaid(channel, message))
                else:
                    reason = f"it sent {message}"
                    log.warning("agent %s: unexpected %s", hello.agent, message)
        except ChannelClosed as error:
            reason = str(error)
        self._inbox.put(AgentGone(channel, hello.agent, reason))

    def settle(self) -> None:
        """Waits until the replies that the loop has given are sent. The inbox must be closed."""
        with self._settled:
            if not self._settled.wait_for(lambda: self._unsettled == 0, self._control_s):
                log.warning("%d replies to operators could not be sent", self._unsettled)

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
