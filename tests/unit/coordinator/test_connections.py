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
    Calls,
    EndWorker,
    Exit,
    Hears,
    Hello,
    Proceed,
    Stop,
    StoreAnswers,
    StoreAsks,
    StoreReply,
    StoreRequest,
    Warned,
    encode,
)
from liver_hpc.rendezvous.channel import (
    ITSELF,
    Channel,
    ChannelClosed,
    Part,
    connect,
)
from liver_hpc.rendezvous.conversation import Conversation
from liver_hpc.rendezvous.server import ControlServer
from tests.memory_channel import MemoryChannel

pytestmark = pytest.mark.timeout(30)

E = TypeVar("E", bound=InboxEvent)
SECRET = b"s" * 32
CALLS = Calls(agent="a7", launches=("a7",))
BOOTED = Hello(worker=4, pid=18, host="n1", booted_s=0.0)
HELLO = AgentHello(agent="a7", host="n1", pid=17)


class Caller:
    """A control server, what it tells the loop, and one who calls."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.connections = ConnectionServer(self.inbox, StoreService(FakeClock()), control_s=5.0)
        self.server = ControlServer("127.0.0.1", SECRET, self.connections.handle)
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
    made.connections.close()
    assert made.inbox.get(0.0) is None  # nothing that nobody looked at


def test_what_an_agent_does_is_news_in_the_order_in_which_it_happens(caller: Caller) -> None:
    warned = Warned(agent="a7", signal="TERM", at_s=3.0)
    caller.channel.send(CALLS)
    parts = [Part(encode(HELLO), 1), Part(encode(BOOTED), 1, who=4), Part(b"", heard=2, who=4)]
    caller.channel.post(parts)
    caller.channel.post([Part(encode(warned), 2)])
    called = caller.next(Called)
    assert called.calls == CALLS
    assert caller.next(Said) == Said(
        called.channel, tuple(zip(parts, (HELLO, BOOTED, None), strict=True))
    )
    assert caller.next(Said).came == ((Part(encode(warned), 2), warned),)
    caller.channel.close()
    closed = caller.next(Closed)
    assert closed.channel is called.channel
    assert "agent a7: closed by the other side" in closed.reason


def test_what_workers_ask_of_the_store_goes_there_and_is_answered_over_the_same_line(
    caller: Caller,
) -> None:
    caller.channel.send(CALLS)
    caller.next(Called)
    asked = [
        (w, StoreRequest(number=n, operation=name, keys=("k",), value="MQ=="))
        for w, n, name in ((4, 5, "get"), (6, 7, "set"), (8, 1, "get"))
    ]
    caller.channel.send(StoreAsks.of(asked))
    got = caller.channel.receive(5.0)
    assert isinstance(got, StoreAnswers)
    assert [*got.replies()] == [
        (4, StoreReply(number=5, value="MQ==")),
        (8, StoreReply(number=1, value="MQ==")),
        (6, StoreReply(number=7)),
    ]
    caller.channel.close()
    caller.next(Closed)


def test_the_loop_reaches_the_agent_by_its_channel(caller: Caller) -> None:
    caller.channel.send(CALLS)
    called = caller.next(Called)
    registry = PeerRegistry(FakeClock())
    registry.connect(called.channel, called.calls, epoch=2)
    registry.send(("a7",), Stop())
    registry.drop("a7", "over")
    got = [caller.channel.receive(5.0) for _ in range(3)]
    assert got == [Hears(heard=0, epoch=2), Stop(), Exit(reason="over")]
    assert "a7" not in registry
    assert "closed on this side" in caller.next(Closed).reason


def test_the_end_of_a_channel_that_broke_while_it_was_answered_is_news() -> None:
    class QuickLoop(Inbox):
        def put(self, event: InboxEvent) -> None:
            super().put(event)
            if isinstance(event, Called):
                event.channel.close("reset")

    inbox = QuickLoop()
    connections = ConnectionServer(inbox, StoreService(FakeClock()), control_s=5.0)
    server = ControlServer("127.0.0.1", SECRET, connections.handle)
    agent = connect(server.address, SECRET, 5.0, "the coordinator")
    agent.send(CALLS)
    called, closed = inbox.get(5.0), inbox.get(5.0)
    assert isinstance(called, Called)
    assert closed == Closed(called.channel, "connection to agent a7: reset")
    agent.close()
    server.close()
    connections.close()


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
    connections = ConnectionServer(inbox, StoreService(FakeClock()), control_s=0.05)
    server = ControlServer("127.0.0.1", SECRET, connections.handle)
    silent = connect(server.address, SECRET, 5.0, "the coordinator")
    with pytest.raises(ChannelClosed):
        silent.receive(5.0)
    server.close()
    assert inbox.get(0.0) is None


# ---- the registry


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def registry(clock: FakeClock) -> PeerRegistry:
    """Agents "a" with the workers 0 and 1, and "b" with 2; nobody is connected."""
    made = PeerRegistry(clock)
    for worker, agent in enumerate("aab"):
        made.add(worker, agent)
    return made


def connect_to(registry: PeerRegistry, agent: str, heard: int = 0, **workers: int) -> MemoryChannel:
    """workers: by name, as w0."""
    channel = MemoryChannel()
    known = {int(name[1:]): number for name, number in workers.items()}
    calls = Calls(agent=agent, heard=heard, workers=known)
    registry.connect(cast(Channel, channel), calls, epoch=1)
    return channel


def lost(registry: PeerRegistry, channel: MemoryChannel) -> None:
    registry.lost(cast(Channel, channel), "the link is down")


def test_silence_is_noticed_of_each_by_itself(registry: PeerRegistry, clock: FakeClock) -> None:
    channel = connect_to(registry, "a", w0=0, w1=0)
    clock.advance(20.0)
    assert registry.agent_at(cast(Channel, channel)) == "a"
    assert registry.take(0, Part(b"{}"))
    clock.advance(20.0)
    assert registry.silent(30.0) == [1]
    clock.advance(20.0)
    assert registry.silent(30.0) == ["a", 0, 1]
    assert registry.workers_of("a") == [0, 1]
    registry.excuse_all()
    assert registry.silent(30.0) == []


def test_what_is_sent_to_all_goes_in_one_frame_to_each_agent(registry: PeerRegistry) -> None:
    a, b = connect_to(registry, "a", w0=0, w1=0), connect_to(registry, "b", w2=0)
    frames = a.frames
    registry.send((0, 1, 2, 9), Stop())
    registry.send(("a",), Exit(reason="enough"))
    registry.flush()
    assert a.messages[1:] == [(0, Stop()), (1, Stop()), (ITSELF, Exit(reason="enough"))]
    assert b.messages[1:] == [(2, Stop())]
    assert a.frames == frames + 1


def test_who_is_dropped_is_told_to_go_and_its_agent_to_kill_it(registry: PeerRegistry) -> None:
    a, b = connect_to(registry, "a", w0=0, w1=0), connect_to(registry, "b", w2=0)
    registry.drop(1, "enough")
    registry.drop("b", "over")
    registry.flush()
    kill = EndWorker(worker=1, reason="enough")
    assert a.messages[1:] == [(1, Exit(reason="enough")), (ITSELF, kill)]
    assert b.messages[1:] == [(ITSELF, Exit(reason="over"))]
    assert (a.closed, b.closed) == (False, True)
    assert registry.workers == [0, 2]
    assert registry.agent_at(cast(Channel, b)) is None


def test_an_agent_that_is_dropped_leaves_its_workers_away(registry: PeerRegistry) -> None:
    a = connect_to(registry, "a", w0=0, w1=0)
    registry.drop("a", "it breaks the rules")
    assert registry.away() == dict.fromkeys((0, 1), "it breaks the rules")
    posted = a.frames
    registry.turn_away("a", 7, "it is not expected")  # in the rest of what it has said at once
    registry.flush()
    assert a.frames == posted


def test_what_is_sent_to_one_who_is_away_waits_until_its_agent_calls_again(
    registry: PeerRegistry, clock: FakeClock
) -> None:
    first = connect_to(registry, "a", w0=0)
    registry.send((0,), Stop())
    registry.flush()
    lost(registry, first)
    assert registry.away() == dict.fromkeys(("a", 0, 1), "the link is down")
    assert registry.silent(0.0) == []
    registry.send((0,), Proceed(generation=0))
    clock.advance(3.0)
    assert registry.away_s(0) == registry.away_s("a") == 3.0
    second = connect_to(registry, "a", w0=1)
    hears = Hears(heard=0, epoch=1, workers={0: 0})
    assert second.messages == [(ITSELF, hears), (0, Proceed(generation=0))]
    assert registry.away() == {1: "the link is down"}  # its agent did not speak of it
    lost(registry, first)  # late
    assert registry.away() == {1: "the link is down"}


def test_who_calls_again_is_not_heard_on_his_former_connection(registry: PeerRegistry) -> None:
    first = connect_to(registry, "a", w0=0)
    assert registry.take(0, Part(b"{}", 1))
    second = connect_to(registry, "a", w0=0)
    assert first.closed
    assert registry.agent_at(cast(Channel, first)) is None
    assert second.messages == [(ITSELF, Hears(heard=0, epoch=1, workers={0: 1}))]
    assert not registry.take(0, Part(b"{}", 1))  # said again


def test_a_worker_that_nobody_knows_is_told_to_go_and_its_agent_to_kill_it(
    registry: PeerRegistry,
) -> None:
    """It may stand still, and another coordinator's order to kill it may not have come."""
    channel = connect_to(registry, "a", w0=0, w7=3)
    reason = "it is not expected"
    told = [(7, Exit(reason=reason)), (ITSELF, EndWorker(worker=7, reason=reason))]
    assert channel.messages[1:] == told
    assert registry.workers == [0, 1, 2]


def test_orders_go_on_behind_those_of_another_coordinator(registry: PeerRegistry) -> None:
    registry.remember("c", Conversation(heard=None))
    registry.send(("c",), Stop())
    channel = connect_to(registry, "c", heard=4)
    assert [part.number for part in channel.posted] == [0, 5]


def test_who_has_said_something_is_told_once_that_it_is_safe(registry: PeerRegistry) -> None:
    channel = connect_to(registry, "a", w0=0)
    assert registry.take(0, Part(b"{}", 1))
    registry.is_safe(0, 1)
    for _ in range(2):
        registry.tell_what_is_safe()
    told = [(part.who, part.heard) for part in channel.posted[1:]]
    assert told == [(0, 1), (ITSELF, 0)]  # and a sign of life
