"""Who calls is told apart, and what workers and agents say becomes news for the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar, cast

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.connections import (
    Called,
    Closed,
    ConnectionServer,
    Inbox,
    InboxEvent,
    PeerRegistry,
    Said,
)
from liver_hpc.coordinator.store import StoreService
from liver_hpc.protocol.messages import (
    AgentHello,
    AnyMessage,
    Calls,
    Exit,
    Hears,
    Proceed,
    Stop,
    Warned,
)
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ControlServer, Numbered, connect

pytestmark = pytest.mark.timeout(30)

E = TypeVar("E", bound=InboxEvent)
SECRET = b"s" * 32
CALLS = Calls(agent="a7", launches=("a7",))
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
    caller.channel.send(CALLS)
    for number, message in enumerate((HELLO, warned), start=1):
        caller.channel.send(message, number, heard=0)
    called = caller.next(Called)
    assert called.calls == CALLS
    assert caller.next(Said) == Said(called.channel, Numbered(HELLO, 1, 0))
    assert caller.next(Said) == Said(called.channel, Numbered(warned, 2, 0))
    caller.channel.close()
    closed = caller.next(Closed)
    assert closed.channel is called.channel
    assert "agent a7: closed by the other side" in closed.reason


def test_a_worker_is_told_apart_by_its_call(caller: Caller) -> None:
    caller.channel.send(Calls(worker=4))
    called = caller.next(Called)
    assert called.calls.worker == 4
    called.channel.close()
    assert "worker 4: closed on this side" in caller.next(Closed).reason


def test_the_loop_reaches_the_agent_by_its_channel(caller: Caller) -> None:
    caller.channel.send(CALLS)
    called = caller.next(Called)
    registry = PeerRegistry(FakeClock())
    registry.connect("a7", called.channel, heard=0, epoch=2)
    registry.send(("a7",), Stop())
    registry.drop("a7", "over")
    got = [caller.channel.receive(5.0) for _ in range(3)]
    assert got == [Hears(heard=0, epoch=2), Stop(), Exit(reason="over")]
    assert "a7" not in registry
    assert "closed on this side" in caller.next(Closed).reason


def test_many_agents_at_once_are_each_their_own(caller: Caller) -> None:
    channels = [connect(caller.server.address, SECRET, 5.0, "the coordinator") for _ in range(8)]
    speak = [
        threading.Thread(
            target=channel.send, args=(CALLS.model_copy(update={"agent": f"a{index}"}),)
        )
        for index, channel in enumerate(channels)
    ]
    for thread in speak:
        thread.start()
    assert {caller.next(Called).calls.agent for _ in channels} == {f"a{i}" for i in range(8)}
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
        self.sent: list[AnyMessage] = []
        self.broken = broken
        self.closed = False

    def send(self, message: AnyMessage, number: int = 0, heard: int = 0) -> None:
        if self.broken:
            raise ChannelClosed("closed")
        self.sent.append(message)

    def close(self, reason: str = "") -> None:
        self.closed = True


def test_silence_is_noticed_of_each_worker_by_itself() -> None:
    clock, lines = FakeClock(), [cast(Channel, Line()) for _ in range(2)]
    registry = PeerRegistry(clock)
    for worker, line in enumerate(lines):
        registry.connect(worker, line, heard=0, epoch=1)
    clock.advance(20.0)
    assert registry.peer_at(lines[0]) == 0
    clock.advance(20.0)
    assert registry.silent_workers(30.0) == [1]
    registry.excuse_all()
    assert registry.silent_workers(30.0) == []


def test_a_message_reaches_all_that_can_be_reached() -> None:
    registry, lines = PeerRegistry(FakeClock()), [Line(), Line(broken=True), Line()]
    for worker, line in enumerate(lines):
        registry.connect(worker, cast(Channel, line), heard=0, epoch=1)
    registry.drop(2, "enough")
    registry.send((0, 1, 2, 9), Stop())
    hears = Hears(heard=0, epoch=1)
    assert [line.sent for line in lines] == [[hears, Stop()], [], [hears, Exit(reason="enough")]]
    assert (lines[2].closed, registry.workers) == (True, [0, 1])
    assert registry.peer_at(cast(Channel, lines[2])) is None


def test_what_is_sent_to_one_who_is_away_waits_until_he_calls_again() -> None:
    clock = FakeClock()
    registry, first, second = PeerRegistry(clock), Line(), Line()
    registry.connect(0, cast(Channel, first), heard=0, epoch=1)
    registry.send((0,), Stop())
    assert registry.lost(cast(Channel, first), "the link is down") == 0
    assert registry.away() == {0: "the link is down"}
    assert registry.silent_workers(0.0) == []
    registry.send((0,), Proceed(generation=0))
    clock.advance(3.0)
    assert registry.away_s(0) == 3.0
    registry.connect(0, cast(Channel, second), heard=1, epoch=1)
    assert second.sent == [Hears(heard=0, epoch=1), Proceed(generation=0)]
    assert registry.away() == {}
    assert registry.lost(cast(Channel, first), "late") is None


def test_who_calls_again_is_not_heard_on_his_former_connection() -> None:
    registry, first, second = PeerRegistry(FakeClock()), Line(), Line()
    registry.connect(0, cast(Channel, first), heard=0, epoch=1)
    assert registry.take(0, Numbered(Stop(), 1, 0))
    registry.connect(0, cast(Channel, second), heard=0, epoch=1)
    assert first.closed
    assert registry.peer_at(cast(Channel, first)) is None
    assert second.sent == [Hears(heard=1, epoch=1)]
    assert not registry.take(0, Numbered(Stop(), 1, 0))  # said again


def test_who_has_said_something_is_told_once_that_it_is_safe() -> None:
    registry, line = PeerRegistry(FakeClock()), Line()
    registry.connect(0, cast(Channel, line), heard=0, epoch=3)
    assert registry.take(0, Numbered(Stop(), 1, 0))
    registry.is_safe(0, 1)
    for _ in range(2):
        registry.tell_what_is_safe(3)
    assert line.sent == [Hears(heard=0, epoch=3), Hears(heard=1, epoch=3)]
