"""Who calls is told apart, and what workers and agents say becomes news for the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar, cast

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.connections import (
    Closed,
    ConnectionServer,
    Inbox,
    InboxEvent,
    PeerRegistry,
    Said,
)
from liver_hpc.coordinator.store import StoreService
from liver_hpc.protocol.messages import AgentHello, Exit, Hello, Stop, ToWorker, Warned
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ControlServer, connect

pytestmark = pytest.mark.timeout(30)

E = TypeVar("E", bound=InboxEvent)
SECRET = b"s" * 32
HELLO = AgentHello(agent="a7", host="n1", pid=17, job="5", step="2")


class Caller:
    """A control server, what it tells the loop, and one who calls."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        connections = ConnectionServer(self.inbox, StoreService(), control_s=5.0)
        self.server = ControlServer("127.0.0.1", SECRET, connections.handle)
        self.channel: Channel = connect(self.server.address, SECRET, 5.0, "the coordinator")

    def next(self, kind: type[E]) -> E:
        event = self.inbox.get(5.0)
        assert isinstance(event, kind), event
        return event


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.channel.close()
    made.server.close()
    assert made.inbox.get(0.0) is None  # nothing that nobody looked at


def test_what_an_agent_does_is_news_in_the_order_in_which_it_happens(caller: Caller) -> None:
    warned = Warned(agent="a7", signal="TERM", at_s=3.0)
    for message in (HELLO, warned, warned):
        caller.channel.send(message)
    opened = caller.next(Said)
    assert opened.message == HELLO
    assert caller.next(Said) == Said(opened.channel, warned)
    assert caller.next(Said).message == warned
    caller.channel.close()
    closed = caller.next(Closed)
    assert closed.channel is opened.channel
    assert "agent a7: closed by the other side" in closed.reason


def test_a_worker_is_told_apart_by_its_first_message(caller: Caller) -> None:
    hello = Hello(worker=4, pid=1, host="n1", booted_s=1.0)
    caller.channel.send(hello)
    opened = caller.next(Said)
    assert opened.message == hello
    opened.channel.close()
    assert "worker 4: closed on this side" in caller.next(Closed).reason


def test_the_loop_reaches_the_agent_by_its_channel(caller: Caller) -> None:
    caller.channel.send(HELLO)
    opened = caller.next(Said)
    registry = PeerRegistry(FakeClock())
    assert registry.add("a7", opened.channel)
    assert not registry.add("a7", opened.channel)
    registry.send(("a7",), Exit(reason="over"))
    assert caller.channel.receive(5.0) == Exit(reason="over")
    registry.drop("a7")
    assert "a7" not in registry
    assert "closed on this side" in caller.next(Closed).reason


def test_many_agents_at_once_are_each_their_own(caller: Caller) -> None:
    channels = [connect(caller.server.address, SECRET, 5.0, "the coordinator") for _ in range(8)]
    speak = [
        threading.Thread(
            target=channel.send, args=(HELLO.model_copy(update={"agent": f"a{index}"}),)
        )
        for index, channel in enumerate(channels)
    ]
    for thread in speak:
        thread.start()
    names = {cast(AgentHello, caller.next(Said).message).agent for _ in channels}
    assert names == {f"a{index}" for index in range(8)}
    for channel in channels:
        channel.close()
    assert all(caller.next(Closed).reason for _ in channels)


def test_who_never_speaks_is_no_event() -> None:
    inbox = Inbox()
    connections = ConnectionServer(inbox, StoreService(), control_s=0.05)
    server = ControlServer("127.0.0.1", SECRET, connections.handle)
    silent = connect(server.address, SECRET, 5.0, "the coordinator")
    with pytest.raises(ChannelClosed):
        silent.receive(5.0)
    server.close()
    assert inbox.get(0.0) is None


# ---- the registry


class Line:
    """A channel's end that keeps what is sent."""

    def __init__(self, broken: bool = False) -> None:
        self.sent: list[ToWorker] = []
        self.broken = broken
        self.closed = False

    def send(self, message: ToWorker) -> None:
        if self.broken:
            raise ChannelClosed("closed")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def test_silence_is_noticed_of_each_worker_by_itself() -> None:
    clock, lines = FakeClock(), [cast(Channel, Line()) for _ in range(2)]
    registry = PeerRegistry(clock)
    for worker, line in enumerate(lines):
        registry.add(worker, line)
    clock.advance(20.0)
    assert registry.peer_at(lines[0]) == 0
    clock.advance(20.0)
    assert registry.silent_workers(30.0) == [1]
    registry.excuse_all()
    assert registry.silent_workers(30.0) == []


def test_a_message_reaches_all_that_can_be_reached() -> None:
    registry, lines = PeerRegistry(FakeClock()), [Line(), Line(broken=True), Line()]
    for worker, line in enumerate(lines):
        registry.add(worker, cast(Channel, line))
    registry.drop(2)
    registry.send((0, 1, 2, 9), Stop())
    assert [line.sent for line in lines] == [[Stop()], [], []]
    assert (lines[2].closed, registry.workers) == (True, [0, 1])
    assert registry.peer_at(cast(Channel, lines[2])) is None
