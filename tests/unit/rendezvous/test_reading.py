"""One thread that reads many channels."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from liver_hpc.protocol.messages import Hello, encode
from liver_hpc.rendezvous import reading
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, Part
from liver_hpc.rendezvous.handshake import CLIENT, SERVER
from liver_hpc.rendezvous.reading import Reader

KEY = b"k" * 32
LIMIT_S = 10.0


class Heard:
    """A reader, and what it has told: (which channel, what of it)."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[Channel, object]] = queue.SimpleQueue()
        self.reader = Reader(
            lambda channel, parts: self.told.put((channel, [part.who for part in parts])),
            lambda channel, reason: self.told.put((channel, reason)),
        )

    def pair(self) -> tuple[Channel, Channel]:
        """The end that is read, and the other one."""
        ours, theirs = (
            Channel(end, "them", KEY, speaker)
            for end, speaker in zip(_connected(), (SERVER, CLIENT), strict=True)
        )
        self.reader.add(ours)
        return ours, theirs

    def next(self) -> tuple[Channel, object]:
        return self.told.get(timeout=LIMIT_S)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.fixture
def heard() -> Iterator[Heard]:
    before = {*threading.enumerate()}
    heard = Heard()
    yield heard
    heard.reader.close()
    assert {*threading.enumerate()} <= before


def said(*workers: int) -> list[Part]:
    data = encode(Hello(worker=0, pid=1, host="n", booted_s=0.0))
    return [Part(data, who=worker) for worker in workers]


def test_what_comes_over_each_channel_is_told_in_order(heard: Heard) -> None:
    pairs = [heard.pair() for _ in range(3)]
    for number, (_, theirs) in enumerate(pairs):
        theirs.post(said(number, number))
        theirs.post(said(number + 10))
    told: dict[Channel, list[object]] = {}
    for _ in range(6):
        channel, what = heard.next()
        told.setdefault(channel, []).append(what)
    assert told == {ours: [[n, n], [n + 10]] for n, (ours, _) in enumerate(pairs)}


def test_what_was_read_behind_the_first_message_is_not_lost(heard: Heard) -> None:
    ours, theirs = (
        Channel(end, "them", KEY, speaker)
        for end, speaker in zip(_connected(), (SERVER, CLIENT), strict=True)
    )
    theirs.post(said(1, 2))
    theirs.post(said(3))
    ours.receive(LIMIT_S)
    heard.reader.add(ours)
    assert [heard.next(), heard.next()] == [(ours, [2]), (ours, [3])]


@pytest.mark.parametrize("who", ["they", "we"])
def test_the_end_of_a_channel_is_told_once_and_frees_it(heard: Heard, who: str) -> None:
    ours, theirs = heard.pair()
    other, still_there = heard.pair()
    (theirs if who == "they" else ours).close("enough")
    channel, reason = heard.next()
    assert channel is ours
    assert str(reason).endswith("closed by the other side" if who == "they" else "enough")
    assert ours.fileno() == -1
    still_there.post(said(7))
    assert heard.next() == (other, [7])


def test_a_frame_that_was_changed_ends_the_channel_after_those_before(heard: Heard) -> None:
    (ours, theirs), (forged, _) = heard.pair(), heard.pair()
    frame = theirs._frame(said(1))
    theirs._socket.sendall(frame + frame)  # the second is a repetition
    assert heard.next() == (ours, [1])
    channel, reason = heard.next()
    assert channel is ours
    assert "changed, repeated" in str(reason)
    assert forged.fileno() > 0


def test_who_stands_still_within_a_frame_holds_nobody_up_and_is_hung_up_on(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STALL_S", 0.2)
    (slow, theirs), (quick, others) = heard.pair(), heard.pair()
    theirs._socket.sendall(theirs._frame(said(1))[:-1])
    others.post(said(2))
    assert heard.next() == (quick, [2])
    channel, reason = heard.next()
    assert channel is slow
    assert "stood still within a message for 0.2 s" in str(reason)


def test_who_has_stood_still_and_gone_on_in_time_is_left_alone(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STALL_S", 0.5)
    ours, theirs = heard.pair()
    frame = theirs._frame(said(1))
    theirs._socket.sendall(frame[:-1])
    time.sleep(0.1)
    theirs._socket.sendall(frame[-1:])
    assert heard.next() == (ours, [1])
    time.sleep(0.6)
    theirs.post(said(2))
    assert heard.next() == (ours, [2])


def test_who_closes_it_writes_to_no_descriptor_that_is_gone(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be awake, and see that it is to end, before it is woken."""
    write = os.write

    def slow(descriptor: int, data: bytes) -> int:
        write(descriptor, data)
        heard.reader._thread.join(0.2)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    heard.reader.close()
    assert not heard.reader._thread.is_alive()


def test_all_channels_end_with_the_reader() -> None:
    heard = Heard()
    ours, theirs = heard.pair()
    heard.reader.close()
    assert heard.next() == (ours, "the server closed")
    with pytest.raises(ChannelClosed, match="closed by the other side"):
        theirs.receive(LIMIT_S)
    with pytest.raises(ChannelClosed, match="the server closed"):
        heard.pair()
