"""A conversation goes on over another connection, with each message taken once and in order."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.clock import SystemClock
from liver_hpc.errors import DeadlineError, ProtocolError
from liver_hpc.protocol.messages import AnyMessage, Calls, Exit, Finished, Hears, Heartbeat
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ControlServer, Numbered
from liver_hpc.rendezvous.conversation import Conversation, Line
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, write_private_json

pytestmark = pytest.mark.timeout(30)

SECRET = b"s" * 32
LIMIT_S = 5.0


def said(step: int) -> Finished:
    return Finished(worker=3, step=step)


class Wire:
    """A channel's end in memory, which breaks after so many messages."""

    def __init__(self, lasts: int = 10**6) -> None:
        self.sent: list[Numbered] = []
        self.lasts = lasts

    def send(self, message: AnyMessage, number: int = 0, heard: int = 0) -> None:
        if len(self.sent) >= self.lasts:
            raise ChannelClosed("it is broken")
        self.sent.append(Numbered(message, number, heard))


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 2**32))
def test_whatever_breaks_each_message_is_taken_once_and_in_order(
    lasting: list[int], seed: int
) -> None:
    """Each connection loses what comes behind so many messages, and some that were on their way."""
    drawn, ours, theirs, taken = random.Random(seed), Conversation(), Conversation(), []
    number = 0
    for lasts in [*lasting, 10**6]:
        wire = Wire(lasts)
        ours.resume(wire, theirs.heard or 0)  # type: ignore[arg-type]
        for _ in range(drawn.randrange(5)):
            number += 1
            ours.send(said(number))
        arrived = wire.sent[: drawn.randint(0, len(wire.sent))] if lasts < 10**6 else wire.sent
        taken += [each.message for each in arrived if theirs.take(each)]
        ours.take(Numbered(Hears(heard=0, epoch=1), 0, drawn.randint(0, theirs.heard or 0)))
    assert taken == [said(each) for each in range(1, number + 1)]


def test_what_is_safe_at_the_other_end_is_kept_no_longer() -> None:
    ours, wire = Conversation(said=[said(1), said(2)]), Wire()
    ours.send(said(3))
    assert ours.take(Numbered(Hears(heard=2, epoch=1), 0, 2))
    ours.resume(wire, 0)  # type: ignore[arg-type]
    assert wire.sent == [Numbered(said(3), 3, 0)]
    assert ours.is_safe(4)
    assert not ours.is_safe(4)
    ours.tell(Heartbeat(worker=3, step=1))
    assert wire.sent[-1] == Numbered(Heartbeat(worker=3, step=1), 0, 4)


def test_a_gap_is_an_error() -> None:
    ours = Conversation(heard=4)
    with pytest.raises(ProtocolError, match="wanted message 5, got 6"):
        ours.take(Numbered(said(1), 6, 0))
    unknown = Conversation(heard=None)
    assert unknown.take(Numbered(said(1), 6, 0))
    assert not unknown.take(Numbered(said(1), 6, 0))


# ---- lines


class Coordinator:
    """Answers calls as number `epoch`, notes what is said, and says what a test puts."""

    def __init__(self, run: RunDirectory, epoch: int, heard: int = 0, exits: bool = False) -> None:
        self.epoch = epoch
        self.heard = heard
        self.exits = exits
        self.calls: queue.Queue[Calls] = queue.Queue()
        self.came: queue.Queue[Numbered] = queue.Queue()
        self.channels: list[Channel] = []
        self.server = ControlServer("127.0.0.1", SECRET, self._serve)
        host, port = self.server.address
        here = {"host": host, "port": port, "pid": 1, "epoch": epoch}
        write_private_json(run.path / COORDINATOR_FILE, here)

    def _serve(self, channel: Channel) -> None:
        calls = channel.receive(LIMIT_S)
        assert isinstance(calls, Calls)
        if self.exits:
            channel.send(Exit(reason="not expected"))
        else:
            channel.send(Hears(heard=self.heard, epoch=self.epoch))
        self.channels.append(channel)
        self.calls.put(calls)
        while True:
            came = channel.receive_numbered()
            self.heard = max(self.heard, came.number)
            self.came.put(came)


class Called:
    """A worker's line, and a thread that hears it. how: why it ended."""

    def __init__(self, run: RunDirectory, coordinator_s: float = LIMIT_S) -> None:
        def call(heard: int, epoch: int) -> Calls:
            return Calls(worker=3, heard=heard, epoch=epoch)

        self.line = Line(run, SECRET, call, SystemClock(), LIMIT_S, coordinator_s)
        self.heard: queue.Queue[AnyMessage] = queue.Queue()
        self.how = ""
        self.ended = threading.Event()

    def open(self, coordinator: Coordinator) -> None:
        self.line.open(coordinator.server.address)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self.heard.put(self.line.receive())
        except ChannelClosed as error:
            self.how = str(error)
        self.ended.set()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def called(run: RunDirectory) -> Iterator[Called]:
    made = Called(run)
    yield made
    made.line.close()


def test_a_line_goes_on_with_the_next_coordinator(run: RunDirectory, called: Called) -> None:
    first = Coordinator(run, 1)
    called.open(first)
    assert first.calls.get(timeout=LIMIT_S) == Calls(worker=3, heard=0, epoch=0)
    called.line.send(said(1))
    assert first.came.get(timeout=LIMIT_S).message == said(1)
    first.channels[0].send(said(9), number=1)
    assert called.heard.get(timeout=LIMIT_S) == said(9)
    first.server.close()
    called.line.send(said(2))
    second = Coordinator(run, 2, heard=0)  # it knows of nothing that was said
    assert second.calls.get(timeout=LIMIT_S) == Calls(worker=3, heard=1, epoch=1)
    got = [second.came.get(timeout=LIMIT_S) for _ in range(2)]
    assert [(each.message, each.number) for each in got] == [(said(1), 1), (said(2), 2)]
    second.channels[0].send(said(9), number=1)  # it had heard that
    second.channels[0].send(said(10), number=2)
    assert called.heard.get(timeout=LIMIT_S) == said(10)
    second.server.close()


def test_a_connection_that_breaks_is_made_again(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    coordinator.channels[0].close("a link")
    assert coordinator.calls.get(timeout=LIMIT_S).epoch == 1
    called.line.send(said(1))
    assert coordinator.came.get(timeout=LIMIT_S).message == said(1)
    coordinator.server.close()


def test_an_older_coordinator_is_not_believed(run: RunDirectory, called: Called) -> None:
    newer = Coordinator(run, 7)
    called.open(newer)
    newer.calls.get(timeout=LIMIT_S)
    older = Coordinator(run, 6)
    newer.server.close()
    with pytest.raises(queue.Empty):
        older.calls.get(timeout=1.0)
    liar = Coordinator(run, 8)
    liar.epoch = 5
    assert liar.calls.get(timeout=LIMIT_S).epoch == 7
    with pytest.raises(ChannelClosed):
        liar.channels[0].receive(LIMIT_S)
    for each in (older, liar):
        each.server.close()


def test_who_is_not_expected_is_told_to_exit(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1, exits=True)
    called.line.open(coordinator.server.address)
    assert called.line.receive(LIMIT_S) == Exit(reason="not expected")
    coordinator.server.close()


def test_one_that_stands_still_is_left_for_the_next_one(
    run: RunDirectory, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.rendezvous.conversation.LOOK_S", 0.2)
    still = Coordinator(run, 1)
    called.open(still)
    still.calls.get(timeout=LIMIT_S)
    another = Coordinator(run, 2)
    assert another.calls.get(timeout=LIMIT_S).epoch == 1
    for each in (still, another):
        each.server.close()


def test_without_another_one_it_ends_after_its_time(run: RunDirectory) -> None:
    coordinator, called = Coordinator(run, 1), Called(run, coordinator_s=0.5)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    began_s = time.monotonic()
    coordinator.server.close()
    assert called.ended.wait(LIMIT_S)
    assert time.monotonic() - began_s >= 0.5
    assert "waited 0.5 s for a coordinator after" in called.how


def test_when_the_run_is_over_nobody_is_waited_for(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    (run.path / COORDINATOR_FILE).unlink()
    Outcome("finished", "", 3).write(run.path)
    coordinator.server.close()
    assert called.ended.wait(LIMIT_S / 2)
    assert "the run has ended" in called.how


def test_silence_has_a_deadline(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.line.open(coordinator.server.address)
    with pytest.raises(DeadlineError):
        called.line.receive(0.05)
    coordinator.server.close()
