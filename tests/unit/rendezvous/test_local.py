"""The line between a worker and its agent: whole messages both ways, and the store's answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from liver_hpc.errors import DeadlineError, StoreAway
from liver_hpc.protocol.messages import (
    Heartbeat,
    Proceed,
    Progress,
    StoreReply,
    StoreRequest,
    decode,
    encode,
)
from liver_hpc.rendezvous.handshake import ChannelClosed
from liver_hpc.rendezvous.local import BOOTED, AgentsEnd, Said, Way, WorkersEnd

pytestmark = pytest.mark.timeout(30)

LIMIT_S = 5.0
PROCEED = Proceed(generation=1)


class Ends:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.agent, self.worker = AgentsEnd(ours), WorkersEnd(theirs)

    def close(self) -> None:
        self.agent.close()
        self.worker.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_messages_go_both_ways_whole_and_in_order(ends: Ends) -> None:
    beat, progress = Heartbeat(worker=3, step=1), Progress(worker=3, generation=1, bytes_done=5)
    ends.worker.send_bytes(BOOTED)
    ends.worker.send(beat, Way.LATER)
    ends.worker.send(progress)
    assert ends.agent.read() == [
        Said(BOOTED),
        Said(encode(beat), Way.LATER),
        Said(encode(progress), Way.ONCE),
    ]
    assert ends.agent.read() == []
    assert ends.agent.write(b"told")
    assert ends.agent.write(encode(PROCEED))
    assert ends.worker.receive_bytes() == b"told"
    assert ends.worker.receive(LIMIT_S) == PROCEED


def test_an_agent_does_not_wait_for_a_worker_that_does_not_read(ends: Ends) -> None:
    number = 0
    while ends.agent.write(bytes([number]) * 100_000):
        number += 1
    got: list[bytes] = []
    reader = threading.Thread(
        target=lambda: got.extend(ends.worker.receive_bytes(LIMIT_S) for _ in range(number + 1))
    )
    reader.start()
    while not ends.agent.flush():
        pass
    reader.join(LIMIT_S)
    assert [each[0] for each in got] == [*range(number + 1)]


def test_the_stores_answers_find_who_has_asked(ends: Ends) -> None:
    answers = [ends.worker.ask(StoreRequest(operation="get", keys=(key,))) for key in "ab"]
    asked = [decode(said.data) for said in ends.agent.read()]
    assert [request.keys for request in asked] == [("a",), ("b",)]  # type: ignore[union-attr]
    for request in asked[::-1]:
        assert isinstance(request, StoreRequest)
        reply = StoreReply(number=request.number, value=request.keys[0] * 2)
        ends.agent.write(encode(reply))
    ends.agent.write(encode(PROCEED))
    assert ends.worker.receive(LIMIT_S) == PROCEED
    assert [answer.result(0.0).value for answer in answers] == ["aa", "bb"]


def test_what_was_asked_fails_when_the_connection_to_the_coordinator_breaks(ends: Ends) -> None:
    answer = ends.worker.ask(StoreRequest(operation="get", keys=("a",)))
    ends.agent.write(b"")
    ends.agent.write(encode(PROCEED))
    assert ends.worker.receive(LIMIT_S) == PROCEED
    with pytest.raises(StoreAway, match="connection to the coordinator has broken"):
        answer.result(0.0)


def test_silence_has_a_deadline(ends: Ends) -> None:
    with pytest.raises(DeadlineError, match="nothing has come from the agent"):
        ends.worker.receive(0.01)


def test_each_end_notices_the_end_of_the_other() -> None:
    ends = Ends()
    ends.worker.send_bytes(b"last words")
    ends.worker.close()
    assert ends.agent.read() == [Said(b"last words")]
    assert ends.agent.ended
    assert ends.agent.write(b"nobody hears it")
    ends.agent.close()

    ends = Ends()
    ends.agent.close()
    with pytest.raises(ChannelClosed):
        ends.worker.receive(LIMIT_S)
    with pytest.raises(ChannelClosed):
        ends.worker.send(PROCEED)
    answer: Future[StoreReply] = ends.worker.ask(StoreRequest(operation="get", keys=("a",)))
    with pytest.raises(ChannelClosed):
        answer.result(0.0)
    ends.worker.close()


def test_after_half_a_message_nothing_follows(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent would take it for the other half."""
    stalled = struct.pack("ll", 0, 100_000)
    ends.worker._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stalled)
    with pytest.raises(ChannelClosed):
        ends.worker.send_bytes(bytes(1 << 22))
    assert ends.agent.read() == []
    with pytest.raises(ChannelClosed, match="Broken pipe"):
        ends.worker.send(PROCEED)
    while not ends.agent.ended:
        assert ends.agent.read() == []
