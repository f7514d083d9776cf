"""Who calls is told apart, and what an agent says becomes events of the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar

import pytest

from liver_hpc.coordinator.connections import ConnectionServer
from liver_hpc.coordinator.inbox import (
    AgentConnected,
    AgentGone,
    AgentSaid,
    AgentWarned,
    Inbox,
    InboxEvent,
)
from liver_hpc.coordinator.store import StoreService
from liver_hpc.protocol.messages import AgentHello, EndAgent, Heartbeat, Warned, WorkerEnded
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ControlServer, connect

pytestmark = pytest.mark.timeout(30)

E = TypeVar("E", bound=InboxEvent)
SECRET = b"s" * 32
HELLO = AgentHello(agent="a7", host="n1", pid=17, job="5", step="2")


class Caller:
    """A greeter behind a server, what it tells the loop, and one who calls."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        connections = ConnectionServer(self.inbox, StoreService(), control_s=5.0)
        self.server = ControlServer("127.0.0.1", SECRET, connections.handle)
        self.channel: Channel = connect(self.server.address, SECRET, 5.0, "the greeter")

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


def test_an_agents_life_is_events_in_the_order_in_which_it_happens(caller: Caller) -> None:
    warned = Warned(agent="a7", signal="TERM", at_s=3.0)
    ended = WorkerEnded(agent="a7", worker=4, how="signal 9")
    for message in (HELLO, warned, ended, warned):
        caller.channel.send(message)
    connected = caller.next(AgentConnected)
    assert connected.hello == HELLO
    assert caller.next(AgentWarned) == AgentWarned(connected.channel, warned)
    assert caller.next(AgentSaid) == AgentSaid(connected.channel, ended)
    assert caller.next(AgentWarned).message == warned
    caller.channel.close()
    gone = caller.next(AgentGone)
    assert (gone.channel, gone.agent) == (connected.channel, "a7")
    assert "agent a7: closed by the other side" in gone.reason


def test_the_loop_reaches_the_agent_by_its_channel(caller: Caller) -> None:
    caller.channel.send(HELLO)
    connected = caller.next(AgentConnected)
    connected.channel.send(EndAgent(reason="over"))
    assert caller.channel.receive(5.0) == EndAgent(reason="over")
    connected.channel.close()
    assert "closed on this side" in caller.next(AgentGone).reason


@pytest.mark.parametrize(
    "wrong",
    [
        Heartbeat(worker=4, step=1),
        HELLO,
        Warned(agent="a8", signal="TERM", at_s=3.0),
        WorkerEnded(agent="a8", worker=4, how="signal 9"),
    ],
    ids=lambda message: message.type,
)
def test_an_agent_that_speaks_out_of_turn_is_hung_up_on(
    caller: Caller, wrong: Heartbeat | AgentHello | Warned | WorkerEnded
) -> None:
    caller.channel.send(HELLO)
    caller.next(AgentConnected)
    caller.channel.send(wrong)
    gone = caller.next(AgentGone)
    assert (gone.agent, "it sent" in gone.reason) == ("a7", True)
    with pytest.raises(ChannelClosed):
        caller.channel.receive(5.0)


def test_many_agents_at_once_are_each_their_own(caller: Caller) -> None:
    channels = [connect(caller.server.address, SECRET, 5.0, "the greeter") for _ in range(8)]
    speak = [
        threading.Thread(
            target=channel.send, args=(HELLO.model_copy(update={"agent": f"a{index}"}),)
        )
        for index, channel in enumerate(channels)
    ]
    for thread in speak:
        thread.start()
    names = {caller.next(AgentConnected).hello.agent for _ in channels}
    assert names == {f"a{index}" for index in range(8)}
    for channel in channels:
        channel.close()
    assert {caller.next(AgentGone).agent for _ in channels} == names


def test_who_never_speaks_is_no_event() -> None:
    inbox = Inbox()
    connections = ConnectionServer(inbox, StoreService(), control_s=0.05)
    server = ControlServer("127.0.0.1", SECRET, connections.handle)
    silent = connect(server.address, SECRET, 5.0, "the greeter")
    with pytest.raises(ChannelClosed):
        silent.receive(5.0)
    server.close()
    assert inbox.get(0.0) is None
