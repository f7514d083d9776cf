"""A conversation goes on over another connection, with each message taken once and in order."""

from __future__ import annotations

import os
import queue
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import ConfigError, DeadlineError, ProtocolError
from liver_hpc.protocol.messages import Calls, Exit, Finished, Hears, encode
from liver_hpc.rendezvous import conversation
from liver_hpc.rendezvous.channel import ITSELF, Channel, ChannelClosed, Part
from liver_hpc.rendezvous.conversation import Conversation, Line
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import EPOCHS, claim_epoch
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, write_private_json

pytestmark = pytest.mark.timeout(30)

SECRET = b"s" * 32
LIMIT_S = 5.0


def said(step: int) -> bytes:
    return encode(Finished(worker=3, step=step))


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 2**32))
def test_whatever_breaks_each_message_is_taken_once_and_in_order(
    lasting: list[int], seed: int
) -> None:
    """Each connection loses what comes behind so many messages, and some that were on their way."""
    drawn, ours, theirs, taken = random.Random(seed), Conversation(), Conversation(), []
    number = 0
    for lasts in [*lasting, 10**6]:
        sent = [*ours.resume(theirs.heard or 0)]
        for _ in range(drawn.randrange(5)):
            number += 1
            sent.append(ours.say(said(number)))
        arrived = sent[: drawn.randint(0, min(len(sent), lasts))] if lasts < 10**6 else sent
        taken += [each.data for each in arrived if theirs.take(each)]
        ours.take(Part(b"", 0, drawn.randint(0, theirs.heard or 0)))
    assert taken == [said(each) for each in range(1, number + 1)]


def test_what_is_safe_at_the_other_end_is_kept_no_longer() -> None:
    ours = Conversation(who=3, said=[said(1), said(2)])
    ours.say(said(3))
    assert not ours.take(Part(b"", heard=2))
    assert [*ours.resume(0)] == [Part(said(3), 3, 0, 3)]
    assert ours.is_safe(4)
    assert not ours.is_safe(4)
    assert ours.tell(b"a beat") == Part(b"a beat", 0, 4, 3)
    assert ours.tell() == Part(b"", 0, 4, 3)


def test_one_that_lacks_what_was_said_knows_it() -> None:
    known = Conversation(3, said=[b"1", b"2"])
    assert [known.lacks(heard) for heard in (0, 2, 3)] == [False, False, True]
    assert not Conversation(3, heard=None).lacks(3), "it goes on behind what another one has said"


def test_a_gap_is_an_error() -> None:
    ours = Conversation(heard=4)
    with pytest.raises(ProtocolError, match="wanted message 5, got 6"):
        ours.take(Part(said(1), 6))


def test_one_that_goes_on_with_what_another_began_takes_its_numbers_from_the_other_end() -> None:
    ours = Conversation(heard=None)
    assert ours.take(Part(said(1), 6))
    assert not ours.take(Part(said(1), 6))
    for step in (1, 2):
        ours.say(said(step))
    assert [part.number for part in ours.resume(heard=5)] == [6, 7]
    assert ours.say(said(3)).number == 8
    assert [part.number for part in ours.resume(heard=7)] == [8]


# ---- lines


class Coordinator:
    """Answers calls as number `epoch`, or `says`, notes what is said, and says what a test puts."""

    def __init__(
        self, run: RunDirectory, epoch: int, heard: int = 0, exits: bool = False, says: int = 0
    ) -> None:
        self.epoch = says or epoch
        self.heard = heard
        self.exits = exits
        self.calls: queue.Queue[Calls] = queue.Queue()
        self.came: queue.Queue[Part] = queue.Queue()
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
            workers = dict.fromkeys(calls.workers, self.heard)
            channel.send(Hears(heard=self.heard, epoch=self.epoch, workers=workers))
        self.channels.append(channel)
        self.calls.put(calls)
        while True:
            for came in channel.receive_parts():
                self.heard = max(self.heard, came.number)
                self.came.put(came)

    def hears(self) -> tuple[int, bytes, int]:
        """Who has said what, with which number."""
        part = self.came.get(timeout=LIMIT_S)
        return part.who, part.data, part.number


class Called:
    """An agent's line, and a thread that hears it. how: why it ended."""

    def __init__(
        self, run: RunDirectory, coordinator_s: float = LIMIT_S, boot_s: float = LIMIT_S
    ) -> None:
        call = Calls(agent="a0", launches=("a0",))
        limits = DeadlineSection(control_s=LIMIT_S, coordinator_s=coordinator_s, boot_s=boot_s)
        self.line = Line(run, SECRET, lambda: call, SystemClock(), limits)
        self.line.add(3)
        self.heard: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self.how = ""
        self.broken = 0
        self.ended = threading.Event()

    def open(self, coordinator: Coordinator) -> None:
        self.line.open(coordinator.server.address)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, step: int, worker: int = 3) -> None:
        self.line.say(said(step), worker)
        self.line.flush()

    def _listen(self) -> None:
        try:
            while True:
                came = self.line.receive()
                self.broken += not came
                for each in came:
                    self.heard.put(each)
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
    want = Calls(agent="a0", launches=("a0",), workers={3: 0})
    assert first.calls.get(timeout=LIMIT_S) == want
    called.say(1)
    assert first.hears() == (3, said(1), 1)
    first.channels[0].post([Part(said(9), 1, who=3)])
    assert called.heard.get(timeout=LIMIT_S) == (3, said(9))
    first.server.close()
    called.say(2)
    called.line.send(Exit(reason="own"))
    second = Coordinator(run, 2, heard=0)  # it knows of nothing that was said
    want = want.model_copy(update={"workers": {3: 1}, "epoch": 1})
    assert second.calls.get(timeout=LIMIT_S) == want
    got = [second.hears() for _ in range(3)]
    own = (ITSELF, encode(Exit(reason="own")), 1)
    assert got == [(3, said(1), 1), (3, said(2), 2), own]  # the agent's own words are the last
    second.channels[0].post([Part(said(9), 1, who=3)])  # it had heard that
    second.channels[0].post([Part(said(10), 2, who=3), Part(said(11), 1, who=8)])
    assert called.heard.get(timeout=LIMIT_S) == (3, said(10))
    assert called.broken == 1
    called.line.tell(b"", ITSELF)
    called.line.flush()
    assert (3, 2) in {(part.who, part.heard) for part in (second.came.get() for _ in range(2))}
    assert called.heard.empty()  # of a worker that is not there
    second.server.close()


def test_what_a_worker_has_said_is_kept_until_its_end_is_safe(
    run: RunDirectory, called: Called
) -> None:
    """It said that its part of a checkpoint is written, and ended, while there was nobody."""
    first = Coordinator(run, 1)
    called.open(first)
    first.calls.get(timeout=LIMIT_S)
    first.server.close()
    called.say(1)
    called.line.send(Exit(reason="its end"))
    called.line.forget(3)
    second = Coordinator(run, 2)
    assert second.calls.get(timeout=LIMIT_S).workers == {3: 0}
    end = (ITSELF, encode(Exit(reason="its end")), 1)
    assert [second.hears() for _ in range(2)] == [(3, said(1), 1), end]
    second.channels[0].post([Part(b"", heard=1, who=3)])  # its words are, its end is not
    second.channels[0].close("a link")
    assert second.calls.get(timeout=LIMIT_S).workers == {3: 0}
    second.channels[1].post([Part(b"", heard=1)])
    deadline = Deadline.after(SystemClock(), LIMIT_S, "its end to be safe")
    poll_until(lambda: 3 not in called.line._conversations, deadline)
    second.channels[1].close("a link")
    assert second.calls.get(timeout=LIMIT_S).workers == {}
    second.server.close()


def test_what_is_said_goes_in_one_frame(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    called.line.add(4)
    called.line.say(said(1), 3)
    called.line.tell(b"beat", 4)
    called.line.tell(b"nobody's", 5)
    assert coordinator.came.empty()
    called.line.flush()
    assert [coordinator.hears() for _ in range(2)] == [(3, said(1), 1), (4, b"beat", 0)]
    called.line.forget(4)
    called.line.tell(b"forgotten", 4)
    called.say(2)
    assert coordinator.hears() == (3, said(2), 2)
    coordinator.server.close()


def test_a_connection_that_breaks_is_made_again(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    coordinator.channels[0].close("a link")
    assert coordinator.calls.get(timeout=LIMIT_S).epoch == 1
    called.say(1)
    assert coordinator.hears() == (3, said(1), 1)
    coordinator.server.close()


def test_a_stranger_at_the_port_of_one_that_is_gone_ends_nothing(
    run: RunDirectory, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a file system that does not answer for a moment."""
    first = Coordinator(run, 1)
    called.open(first)
    first.calls.get(timeout=LIMIT_S)
    strange = ControlServer("127.0.0.1", b"another secret of 32 bytes or so", lambda channel: None)
    answers = iter([OSError(116, "Stale file handle"), ConfigError("may not be read")])

    def last_outcome(_: RunDirectory) -> Any:
        for error in answers:
            raise error

    monkeypatch.setattr(RunDirectory, "last_outcome", last_outcome)
    host, port = strange.address
    write_private_json(
        run.path / COORDINATOR_FILE, {"host": host, "port": port, "pid": 1, "epoch": 1}
    )
    first.server.close()
    assert not called.ended.wait(1.0)
    second = Coordinator(run, 2)
    assert second.calls.get(timeout=LIMIT_S).epoch == 1
    assert next(answers, None) is None
    for each in (strange, second.server):
        each.close()


def test_an_older_coordinator_is_not_believed(run: RunDirectory, called: Called) -> None:
    newer = Coordinator(run, 7)
    called.open(newer)
    newer.calls.get(timeout=LIMIT_S)
    older = Coordinator(run, 6)
    newer.server.close()
    with pytest.raises(queue.Empty):
        older.calls.get(timeout=1.0)
    liar = Coordinator(run, 8, says=5)
    assert liar.calls.get(timeout=LIMIT_S).epoch == 7
    with pytest.raises(ChannelClosed):
        liar.channels[0].receive(LIMIT_S)
    for each in (older, liar):
        each.server.close()


def test_who_is_not_expected_is_told_to_exit(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1, exits=True)
    called.line.open(coordinator.server.address)
    assert called.line.receive() == [(ITSELF, encode(Exit(reason="not expected")))]
    assert called.line.is_told_to_go
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


def test_whoever_closes_its_end_hears_of_that(run: RunDirectory, called: Called) -> None:
    coordinator = Coordinator(run, 1)
    called.open(coordinator)
    coordinator.calls.get(timeout=LIMIT_S)
    called.line.close()
    assert called.ended.wait(LIMIT_S)
    coordinator.server.close()


def test_silence_has_a_deadline(run: RunDirectory, called: Called) -> None:
    coordinator, whose = Coordinator(run, 1), "the coordinator's control channel"
    called.line.open(coordinator.server.address)
    coordinator.server.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        waits = rf"waited 0\.2 s for {whose}: .* before its proof"
        with pytest.raises(DeadlineError, match=waits):
            called.line._connect(silent.getsockname(), 0.2)


def test_a_coordinator_that_is_gone_is_missed_again_and_again(run: RunDirectory) -> None:
    missed: list[int] = []
    claim_epoch(run.path)
    called, gone = Called(run, coordinator_s=1.5), Coordinator(run, 4)
    called.line.missed = missed.append
    called.open(gone)
    gone.calls.get(timeout=LIMIT_S)
    gone.server.close()
    assert called.ended.wait(LIMIT_S)
    assert missed in ([1, 2], [1, 2, 3])


@pytest.mark.parametrize("lives", [True, False], ids=["lives", "unknown"])
def test_a_coordinator_that_shows_is_not_gone(run: RunDirectory, lives: bool) -> None:
    """It is the way to it that is broken; nor is one of which nothing is known."""
    missed: list[int] = []
    epoch = claim_epoch(run.path)
    called, cut_off = Called(run, coordinator_s=1.5), Coordinator(run, 4)
    called.line.missed = missed.append
    called.open(cut_off)
    cut_off.calls.get(timeout=LIMIT_S)
    if not lives:
        shutil.rmtree(run.path / EPOCHS)
    cut_off.server.close()
    while not called.ended.wait(0.1):
        if lives:
            epoch.show()
    assert missed == []
    assert "waited 1.5 s for a coordinator" in called.how


@pytest.mark.parametrize(
    ("boot_s", "journal_mb"),
    [(10.0, 0), (1.0, 0), (1.0, 40)],
    ids=["in time", "too late", "in time for what it reads"],
)
def test_one_that_begins_is_waited_for(
    run: RunDirectory, boot_s: float, journal_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the last one has left, however long that has been running."""
    monkeypatch.setattr("liver_hpc.run.epoch.SHOWN_EVERY_S", 0.1)
    missed: list[int] = []
    claim_epoch(run.path)
    (run.path / "journal.jsonl").touch()
    os.truncate(run.path / "journal.jsonl", journal_mb * 10**6)
    called, gone = Called(run, coordinator_s=1.2, boot_s=boot_s), Coordinator(run, 1)
    called.line.missed = missed.append
    called.open(gone)
    gone.calls.get(timeout=LIMIT_S)
    gone.server.close()
    with claim_epoch(run.path).shown():
        assert called.ended.wait(3.5) == (boot_s == 1.0 and not journal_mb)
    if boot_s > 1.0 or journal_mb:
        following = Coordinator(run, 2)
        following.calls.get(timeout=LIMIT_S)
        called.line.close()
        following.server.close()
    assert missed == []


def test_a_host_that_does_not_answer_is_not_waited_for_while_another_one_does(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "LOOK_S", 0.2)
    called, gone = Called(run, coordinator_s=12.0), Coordinator(run, 4)
    called.open(gone)
    gone.calls.get(timeout=LIMIT_S)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        here = {"host": host, "port": port, "pid": 1, "epoch": 4}
        write_private_json(run.path / COORDINATOR_FILE, here)
        gone.server.close()
        silent.accept()
        began_s, following = time.monotonic(), Coordinator(run, 5)
        following.calls.get(timeout=LIMIT_S)
        assert time.monotonic() - began_s < 3.0
    following.server.close()
    called.line.close()
