"""The control channel: authenticated on both sides, framed JSON, no thread or socket left."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import DeadlineError, LiverError, ProtocolError
from liver_hpc.host.process import raise_descriptor_limit
from liver_hpc.protocol.messages import (
    AnyMessage,
    Heartbeat,
    Reply,
    StatusRequest,
    StopRequest,
    encode,
)
from liver_hpc.rendezvous import channel as channel_module
from liver_hpc.rendezvous import server as server_module
from liver_hpc.rendezvous.channel import (
    Channel,
    ChannelClosed,
    ChannelRefused,
    Part,
    connect,
)
from liver_hpc.rendezvous.handshake import (
    ANSWER_BYTES,
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    SEAL_BYTES,
    prove,
)
from liver_hpc.rendezvous.server import ControlServer

pytestmark = pytest.mark.timeout(30)

SECRET = b"s" * 32
HOST = "127.0.0.1"
BEAT = Heartbeat(worker=3, step=7)


def echo(channel: Channel) -> None:
    while True:
        channel.send(channel.receive())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test ends with the threads and descriptors that it began with."""
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    yield
    end_s = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= threads, threading.enumerate()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@contextmanager
def serving(
    handle: Callable[[Channel], None] = echo, handshake_s: float = 5.0
) -> Iterator[ControlServer]:
    server = ControlServer(HOST, SECRET, handle)
    try:
        with mock.patch.object(server_module, "HANDSHAKE_S", handshake_s):
            yield server
    finally:
        server.close()


@contextmanager
def connected(server: ControlServer, secret: bytes = SECRET) -> Iterator[Channel]:
    channel = connect(server.address, secret, 5.0, "the server")
    try:
        yield channel
    finally:
        channel.close()


@contextmanager
def raw_client(server: ControlServer) -> Iterator[socket.socket]:
    """Somebody who speaks TCP and nothing else."""
    with socket.create_connection(server.address, timeout=5.0) as stranger:
        yield stranger


def wait_closed(stranger: socket.socket) -> None:
    """Reads until the other side closes, as FIN or as RST."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass


def drip(stranger: socket.socket) -> None:
    for _ in range(100):
        stranger.sendall(b"\0")
        time.sleep(0.05)


def send_for_ever(channel: Channel) -> None:
    while True:
        channel.send(Reply(ok=True, text="z" * 2**20))


# ---- messages


def test_messages_arrive_whole_and_in_order() -> None:
    with serving() as server, connected(server) as channel:
        for step in range(200):
            channel.send(Heartbeat(worker=1, step=step))
        assert [channel.receive(5.0) for _ in range(200)] == [
            Heartbeat(worker=1, step=step) for step in range(200)
        ]


def test_a_message_of_several_megabytes_arrives() -> None:
    message = Reply(ok=True, text="x" * (5 * 2**20))
    with serving() as server, connected(server) as channel:
        channel.send(message)
        assert channel.receive(10.0) == message


def test_many_threads_may_send_at_once() -> None:
    got: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()

    def collect(channel: Channel) -> None:
        while True:
            got.put(channel.receive())

    def talk(worker: int) -> None:
        for step in range(50):
            channel.send(Reply(ok=True, text="y" * 20_000, data={"worker": worker, "step": step}))

    with serving(collect) as server, connected(server) as channel:
        threads = [threading.Thread(target=talk, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [got.get(timeout=5.0) for _ in range(200)]
    steps: dict[int, list[int]] = {worker: [] for worker in range(4)}
    for message in seen:
        assert isinstance(message, Reply)
        steps[message.data["worker"]].append(message.data["step"])
    assert steps == {worker: list(range(50)) for worker in range(4)}


def test_parts_of_several_arrive_in_one_frame_what_they_share_once() -> None:
    frames: queue.SimpleQueue[list[Part]] = queue.SimpleQueue()

    def collect(channel: Channel) -> None:
        while True:
            frames.put(channel.receive_parts())

    long, beat = b"x" * 100_000, encode(BEAT)
    parts = [Part(long, 3, 1, who=4), Part(long, 9, 2, who=5), Part(b"", heard=7), Part(beat, 1)]
    with serving(collect) as server, connected(server) as channel:
        sent = mock.Mock(wraps=channel._socket.send)
        with mock.patch.object(channel, "_socket", mock.Mock(wraps=channel._socket, send=sent)):
            channel.post(parts)
        assert frames.get(timeout=5.0) == parts
        assert len(sent.call_args.args[0]) < 1.1 * len(long)


def test_what_is_posted_to_one_who_does_not_read_waits_for_it() -> None:
    reads, heard = threading.Event(), queue.SimpleQueue[int]()

    def slow(channel: Channel) -> None:
        reads.wait(10)
        while True:
            heard.put(channel.receive_parts()[0].number)

    with serving(slow) as server, connected(server) as channel:
        began_s = time.monotonic()
        for number in range(20):
            channel.post([Part(b"x" * 2**20, number)])
        channel.send(BEAT)
        assert time.monotonic() - began_s < 5.0
        assert channel._writer is not None
        reads.set()
        assert [heard.get(timeout=5.0) for _ in range(21)] == [*range(20), 0]


def test_who_never_reads_what_is_posted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MOST_WAITING_BYTES", 2**20)
    release = threading.Event()
    with serving(lambda channel: [release.wait(10), None][1]) as server:
        with connected(server) as channel:
            for _ in range(20):
                channel.post([Part(b"x" * 2**20)])
            with pytest.raises(ChannelClosed, match="has not read"):
                channel.receive(5.0)
        release.set()


def test_who_stands_still_while_what_was_posted_waits_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 1.0)
    release = threading.Event()
    with serving(lambda channel: [release.wait(10), None][1]) as server:
        with connected(server) as channel:
            channel.post([Part(bytes(2**20)) for _ in range(20)])
            with pytest.raises(ChannelClosed, match="stood still within a message for 1 s"):
                channel.receive(5.0)
        release.set()


def test_who_reads_nothing_and_has_no_thread_to_wait_for_it_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, begin = threading.Event(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("write-"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with serving(lambda channel: [release.wait(10), None][1]) as server:
        with connected(server) as channel:
            monkeypatch.setattr(threading.Thread, "start", start)
            for _ in range(20):
                channel.post([Part(b"x" * 2**20)])
            with pytest.raises(ChannelClosed, match="can't start new thread"):
                channel.receive(5.0)
        release.set()


def test_too_long_a_message_is_refused_by_its_sender_and_the_channel_lives() -> None:
    with serving() as server, connected(server) as channel:
        with pytest.raises(ProtocolError, match="at most 16777216"):
            channel.send(Reply(ok=True, text="x" * channel_module.MAX_MESSAGE_BYTES))
        channel.send(BEAT)
        assert channel.receive(5.0) == BEAT


def test_every_accepted_connection_has_its_own_thread_and_peer() -> None:
    names: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def introduce(channel: Channel) -> None:
        names.put((channel.peer, threading.current_thread().name))
        echo(channel)

    with serving(introduce) as server, connected(server), connected(server):
        first, second = names.get(timeout=5.0), names.get(timeout=5.0)
    assert first[0] != second[0]
    assert first[1] != second[1]


# ---- waiting and closing


def test_receive_ends_at_its_deadline_and_the_channel_lives() -> None:
    with serving() as server, connected(server) as channel:
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for a message from the server"):
            channel.receive(0.05)
        channel.send(BEAT)
        assert channel.receive(5.0) == BEAT


def test_close_unblocks_a_receive_in_another_thread() -> None:
    errors: queue.SimpleQueue[ChannelClosed] = queue.SimpleQueue()

    def wait(channel: Channel) -> None:
        try:
            channel.receive()
        except ChannelClosed as error:
            errors.put(error)

    with serving() as server, connected(server) as channel:
        thread = threading.Thread(target=wait, args=(channel,))
        thread.start()
        time.sleep(0.05)  # it is most likely blocked by now; the test holds either way
        channel.close()
        channel.close()
        assert "closed on this side" in str(errors.get(timeout=1.0))
        thread.join()
        with pytest.raises(ChannelClosed):
            channel.send(BEAT)
        with pytest.raises(ChannelClosed):
            channel.receive(1.0)


def test_close_unblocks_a_send_that_the_peer_does_not_read() -> None:
    release = threading.Event()
    with serving(lambda channel: [release.wait(10), None][1]) as server:
        with connected(server) as channel:
            errors: queue.SimpleQueue[ChannelClosed] = queue.SimpleQueue()

            def flood() -> None:
                try:
                    send_for_ever(channel)
                except ChannelClosed as error:
                    errors.put(error)

            thread = threading.Thread(target=flood)
            thread.start()
            time.sleep(0.2)
            assert thread.is_alive()
            channel.close()
            errors.get(timeout=2.0)
            thread.join()
        release.set()


def test_a_peer_that_stands_still_within_a_message_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 1.0)
    release, ended = threading.Event(), threading.Event()

    def stall(channel: Channel) -> None:
        channel._socket.sendall(struct.pack("!II", 100, 1) + b"only this")
        release.wait(10)
        ended.set()

    with serving(stall) as server, connected(server) as channel:
        with pytest.raises(ChannelClosed, match="stood still within a message for 1 s"):
            channel.receive()
        release.set()
        assert ended.wait(5.0)


def test_a_way_that_is_broken_is_given_up_long_before_who_lives_counts_as_silent() -> None:
    """After a link was out for 20 s, TCP's own next try came when 34.9 s had been silent."""
    with serving() as server, connected(server) as channel:
        its = channel._socket
        limit_ms = its.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms <= 1000 * DeadlineSection().heartbeat_s / 3


def test_the_end_of_the_peer_is_noticed() -> None:
    with serving(lambda channel: None) as server, connected(server) as channel:
        with pytest.raises(ChannelClosed, match="closed by the other side"):
            channel.receive(5.0)
        with pytest.raises(ChannelClosed):
            send_for_ever(channel)


def test_closing_the_server_closes_its_channels_and_ends_its_threads() -> None:
    with serving() as server, connected(server) as one, connected(server) as two:
        server.close()
        server.close()
        for channel in (one, two):
            with pytest.raises(ChannelClosed):
                channel.receive(5.0)
        with pytest.raises(ChannelClosed, match="the server at"):
            connect(server.address, SECRET, 1.0, "the server")


def test_a_handler_may_close_the_server() -> None:
    servers: queue.SimpleQueue[ControlServer] = queue.SimpleQueue()
    with serving(lambda channel: servers.get().close()) as server, connected(server) as channel:
        servers.put(server)
        with pytest.raises(ChannelClosed):
            channel.receive(5.0)


# ---- strangers


def test_wrong_secret_is_refused_on_both_sides_and_others_are_served() -> None:
    handled = threading.Event()

    def handle(channel: Channel) -> None:
        handled.set()
        echo(channel)

    with serving(handle) as server:
        with pytest.raises(ChannelRefused, match="do not hold the same secret"):
            connect(server.address, b"wrong" * 6, 5.0, "the server")
        assert not handled.is_set()
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT


@contextmanager
def impostor(*says: Callable[[bytes], bytes]) -> Iterator[tuple[str, int]]:
    """A server that says one thing after the other, each made of what the client said last, and
    hangs up on its first client."""

    def pretend() -> None:
        said = b""
        with listener, listener.accept()[0] as client:
            for say in says:
                client.sendall(say(said))
                with contextlib.suppress(ConnectionResetError):  # it has heard enough
                    said = client.recv(4096)

    listener = socket.create_server((HOST, 0))
    thread = threading.Thread(target=pretend)
    thread.start()
    yield listener.getsockname()
    thread.join()


def challenge(said: bytes) -> bytes:
    return GREETING + b"n" * NONCE_BYTES


def test_a_server_that_does_not_hold_the_secret_is_refused() -> None:
    """It accepts any answer, but has no proof of its own."""
    forged = b"p" * PROOF_BYTES
    with (
        impostor(challenge, lambda said: forged) as address,
        pytest.raises(ChannelRefused, match=r"the server at .*: .* not hold the same secret"),
    ):
        connect(address, SECRET, 5.0, "the server")


def test_a_clients_own_proof_does_not_pass_as_the_servers() -> None:
    """Who speaks is part of the proof, so that it cannot be reflected."""

    def reflect(said: bytes) -> bytes:
        return said[-PROOF_BYTES:]

    with (
        impostor(challenge, reflect) as address,
        pytest.raises(ChannelRefused, match="do not hold the same secret"),
    ):
        connect(address, SECRET, 5.0, "the server")


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\0" * 60, b"liver_hpc wire 1\0"])
def test_a_server_of_another_protocol_is_no_wrong_secret(said: bytes) -> None:
    with (
        impostor(lambda _: said) as address,
        pytest.raises(ChannelClosed, match="does not speak liver_hpc's protocol: it began") as info,
    ):
        connect(address, SECRET, 5.0, "the server")
    assert not isinstance(info.value, ChannelRefused)


@pytest.mark.parametrize("says", [(), (challenge,)], ids=["at once", "after the answer"])
def test_a_server_that_hangs_up_is_tried_again_until_it_listens_no_more(
    says: tuple[Callable[[bytes], bytes], ...],
) -> None:
    with (
        impostor(*says) as address,
        pytest.raises(ChannelClosed, match=f"the server at {HOST}.*: Connection refused"),
    ):
        connect(address, SECRET, 5.0, "the server")


def test_a_server_that_hangs_up_each_time_is_told_of_at_the_deadline() -> None:
    closed = threading.Event()

    def hang_up() -> None:
        while not closed.is_set():
            listener.accept()[0].close()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(
            DeadlineError, match=r"waited 0\.3 s for the server: .* before its proof"
        ):
            connect(listener.getsockname(), SECRET, 0.3, "the server")
        closed.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname()).close()
        thread.join()


def test_no_digest_but_sha256_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in FIPS mode has no MD5, which the challenge of `multiprocessing` uses."""

    def without_md5(name: str) -> None:
        whole = getattr(hmac, name)

        def strict(key: bytes, message: bytes | None = None, digest: object = "") -> object:
            assert digest in ("sha256", hashlib.sha256), f"{digest} is not to be had"
            return whole(key, message, digest)

        monkeypatch.setattr(hmac, name, strict)

    without_md5("new")
    without_md5("digest")
    with serving() as server, connected(server) as channel:
        channel.send(BEAT)
        assert channel.receive(5.0) == BEAT


def test_a_thread_that_cannot_be_started_costs_that_try_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The acceptor lives; the client tries again within its deadline."""
    start, failures = threading.Thread.start, iter([True, True])

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith("wire-") and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with serving() as server:
        for _ in range(2):
            with connected(server) as channel:
                channel.send(BEAT)
                assert channel.receive(5.0) == BEAT
    assert "turned away: can't start new thread" in caplog.text
    assert "2 strangers were turned away in all" in caplog.text


def test_silent_strangers_hold_nobody_up_and_are_dropped() -> None:
    with serving(handshake_s=0.3) as server:
        strangers = [socket.create_connection(server.address, timeout=5.0) for _ in range(8)]
        started_s = time.monotonic()
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT
        assert time.monotonic() - started_s < 0.3
        for stranger in strangers:
            wait_closed(stranger)
            stranger.close()
        assert time.monotonic() - started_s < 3.0


def test_a_stranger_that_drips_bytes_is_dropped_at_the_same_deadline() -> None:
    with serving(handshake_s=0.4) as server, raw_client(server) as stranger:
        started_s = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(stranger)
        assert time.monotonic() - started_s < 2.0


def test_half_open_strangers_hold_no_threads_and_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have all places there are; who comes later takes the place of the first of them."""
    monkeypatch.setattr(server_module, "MOST_STRANGERS", 4)
    with serving(handshake_s=20.0) as server, contextlib.ExitStack() as stack:
        threads = threading.active_count()
        strangers = [stack.enter_context(raw_client(server)) for _ in range(18)]
        wait_closed(strangers[13])
        assert threading.active_count() == threads
        started_s = time.monotonic()
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT
        assert time.monotonic() - started_s < 1.0


def test_an_answer_in_single_bytes_is_an_answer() -> None:
    with serving() as server, raw_client(server) as client:
        challenged, nonce = client.recv(4096), b"c" * NONCE_BYTES
        nonces = challenged[len(GREETING) :] + nonce
        for byte in GREETING + nonce + prove(SECRET, b"C", nonces):
            client.sendall(bytes([byte]))
        assert client.recv(4096) == prove(SECRET, b"S", nonces)


def test_a_wrong_secret_learns_no_proof() -> None:
    with serving() as server, raw_client(server) as client:
        challenged, nonce = client.recv(4096), b"c" * NONCE_BYTES
        client.sendall(GREETING + nonce + prove(b"?", b"C", challenged[len(GREETING) :] + nonce))
        assert client.recv(4096) == bytes(PROOF_BYTES)
        assert client.recv(4096) == b""


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A soft limit of 1,024 for this test; the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_clients_at_once_all_get_in(
    few_descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have connected before the first one answers its challenge, with half-open strangers
    before them."""
    number = 1000
    raise_descriptor_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * number + 200:
        pytest.skip(f"a hard limit of {few_descriptors} descriptors is too low for both ends")
    together = threading.Barrier(number, timeout=20.0)
    connected_once: set[threading.Thread] = set()
    errors: list[Exception] = []
    create_connection = socket.create_connection

    def create_together(*arguments: Any, **options: Any) -> socket.socket:
        made = create_connection(*arguments, **options)
        if threading.current_thread() not in connected_once:
            connected_once.add(threading.current_thread())
            together.wait()
        return made

    def call() -> None:
        try:
            with contextlib.closing(connect(server.address, SECRET, 20.0, "the server")) as channel:
                channel.send(BEAT)
                assert channel.receive(20.0) == BEAT
                together.wait()
        except (LiverError, OSError, AssertionError, threading.BrokenBarrierError) as error:
            errors.append(error)
            together.abort()

    with serving() as server, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(raw_client(server))
        monkeypatch.setattr(socket, "create_connection", create_together)
        threads = [threading.Thread(target=call) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_connection_takes_one_descriptor_at_each_end() -> None:
    with serving() as server, contextlib.ExitStack() as stack:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(10):
            channel = stack.enter_context(connected(server))
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 20


def test_a_server_out_of_descriptors_serves_again_once_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.socket())
        next_free = os.dup(client.fileno())
        os.close(next_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
        try:
            client.connect(server.address)
            end_s = time.monotonic() + 5
            while "Too many open files" not in caplog.text and time.monotonic() < end_s:
                time.sleep(0.01)
            assert "Too many open files" in caplog.text
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT
    assert caplog.text.count("Too many open files") < 20


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!i", 2**31 - 1),
        struct.pack("!i", -5),
        struct.pack("!i", -1) + struct.pack("!Q", 2**62),
        bytes(range(1, 256)),
    ],
)
def test_junk_instead_of_a_proof_is_dropped(junk: bytes) -> None:
    with serving(handshake_s=0.5) as server:
        with raw_client(server) as stranger:
            with contextlib.suppress(ConnectionError):  # it may know after the first bytes
                stranger.sendall(junk)
            wait_closed(stranger)
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("junk", ["a pickle", "text", "unknown type", "too long"])
def test_what_is_no_message_closes_that_channel_alone(
    junk: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bait = tmp_path / "unpickled"
    data = {
        "a pickle": pickle.dumps(Bomb(bait)),
        "text": b"hello",
        "unknown type": b'{"type": "nonsense"}',
    }
    with serving() as server, connected(server) as other:
        channel = connect(server.address, SECRET, 5.0, "the server")
        if junk == "too long":
            channel._socket.sendall(struct.pack("!II", channel_module.MAX_MESSAGE_BYTES + 99, 1))
        else:
            channel.post([Part(data[junk])])
        with pytest.raises(ChannelClosed):
            channel.receive(5.0)
        other.send(BEAT)
        assert other.receive(5.0) == BEAT
    assert not bait.exists()
    if junk in data:
        assert "closing the channel to 127.0.0.1:" in caplog.text
        assert "not a message" in caplog.text


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each is counted, few are told of."""
    with serving() as server:
        for _ in range(50):
            with socket.create_connection(server.address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(OSError):
                    while stranger.recv(1 << 10):
                        pass
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT
    lines = [record.message for record in caplog.records if "turned away" in record.message]
    assert len(lines) <= 4
    assert lines[-1] == "50 strangers were turned away in all"


# ---- somebody in between, who does not hold the secret


class Relay:
    """Passes on what two ends of a connection say, frame by frame, as `change` would have it: it
    gets the frames so far of one direction, the newest last, and gives what is passed on for it.

    answer: what the client said first, its proof.
    """

    def __init__(
        self, server: tuple[str, int], change: Callable[[bool, list[bytes]], list[bytes]]
    ) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address = self._listener.getsockname()
        self._server, self._change = server, change
        self.answer = b""
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._server)
        challenged = server.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        client.sendall(challenged)
        self.answer = client.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        server.sendall(self.answer)
        client.sendall(server.recv(PROOF_BYTES, socket.MSG_WAITALL))
        ways = ((client, server, True), (server, client, False))
        threads = [threading.Thread(target=self._pass_on, args=way) for way in ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        server.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket, of_client: bool) -> None:
        frames: list[bytes] = []
        with contextlib.suppress(OSError, struct.error):
            while True:
                head = source.recv(8, socket.MSG_WAITALL)
                size = struct.unpack("!II", head)[0] + SEAL_BYTES
                frames.append(head + source.recv(size, socket.MSG_WAITALL))
                for frame in self._change(of_client, frames):
                    sink.sendall(frame)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join()


STOP = StopRequest(checkpoint=False)


def altered(of_client: bool, frames: list[bytes]) -> list[bytes]:
    """A word of the same meaning to whoever reads JSON: `true ` is as long as `false`."""
    return [frames[-1].replace(b"false", b"true ")]


def said_again(of_client: bool, frames: list[bytes]) -> list[bytes]:
    return [frames[-1]] * (2 if of_client and len(frames) == 2 else 1)


def left_out(of_client: bool, frames: list[bytes]) -> list[bytes]:
    return [] if of_client and len(frames) == 1 else frames[-1:]


def swapped(of_client: bool, frames: list[bytes]) -> list[bytes]:
    if not of_client or len(frames) > 2:
        return frames[-1:]
    return frames[::-1] if len(frames) == 2 else []


@pytest.mark.parametrize("change", [altered, said_again, left_out, swapped])
def test_who_changes_what_is_said_is_not_believed(
    change: Callable[[bool, list[bytes]], list[bytes]],
) -> None:
    """The channel closes; nothing that the other end did not say, in its order, is heard."""
    heard: queue.Queue[AnyMessage] = queue.Queue()
    closed: queue.Queue[str] = queue.Queue()

    def listen(channel: Channel) -> None:
        try:
            while True:
                heard.put(channel.receive(10.0))
        except ChannelClosed as error:
            closed.put(str(error))
            raise

    with serving(listen) as server:
        relay = Relay(server.address, change)
        channel = connect(relay.address, SECRET, 5.0, "the server")
        sent = [STOP, StopRequest(checkpoint=False), BEAT]
        for message in sent:
            with contextlib.suppress(ChannelClosed):
                channel.send(message)
        assert "changed, repeated or left out" in closed.get(timeout=10.0)
        channel.close()
        relay.close()
    got = [heard.get() for _ in range(heard.qsize())]
    assert got == sent[: len(got)]
    assert len(got) < len(sent)


def test_what_a_relay_leaves_alone_goes_through() -> None:
    with serving() as server:
        relay = Relay(server.address, lambda of_client, frames: frames[-1:])
        channel = connect(relay.address, SECRET, 5.0, "the server")
        for message in (STOP, BEAT):
            channel.send(message)
            assert channel.receive(5.0) == message
        channel.close()
        relay.close()


def test_ones_own_words_sent_back_are_not_believed() -> None:
    """Each end has its own key."""

    def reflect(channel: Channel) -> None:
        channel._socket.sendall(channel._socket.recv(1 << 10))
        channel._socket.recv(1)

    with serving(reflect) as server, connected(server) as channel:
        channel.send(BEAT)
        with pytest.raises(ChannelClosed, match="changed, repeated or left out"):
            channel.receive(5.0)


# ---- connecting


def test_connect_to_nobody_says_who_is_missing() -> None:
    with socket.create_server((HOST, 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ChannelClosed, match=f"the coordinator at 127.0.0.1:{address[1]}"):
        connect(address, SECRET, 5.0, "the coordinator")


def test_a_connection_that_the_server_never_has_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of many at once, where its kernel has room for few."""
    monkeypatch.setattr(channel_module, "TRY_S", 0.2)
    create_connection = socket.create_connection
    with serving() as server, socket.create_server((HOST, 0)) as silent:
        addresses = iter([silent.getsockname(), server.address])
        monkeypatch.setattr(
            socket,
            "create_connection",
            lambda _, timeout: create_connection(next(addresses), timeout),
        )
        with connected(server) as channel:
            channel.send(BEAT)
            assert channel.receive(5.0) == BEAT


def test_connect_to_a_silent_listener_ends_at_its_deadline() -> None:
    with (
        socket.create_server((HOST, 0)) as listener,
        pytest.raises(DeadlineError, match=r"waited 0\.2 s for the coordinator"),
    ):
        connect(listener.getsockname(), SECRET, 0.2, "the coordinator")


def test_the_server_listens_on_the_given_host_alone() -> None:
    with serving() as server:
        assert server.address[0] == HOST
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", server.address[1]))


def test_status_request_and_reply_over_a_named_peer() -> None:
    def answer(channel: Channel) -> None:
        channel.peer = "the operator"
        assert channel.receive(5.0) == StatusRequest()
        channel.send(Reply(ok=True, text=channel.peer))

    with serving(answer) as server, connected(server) as channel:
        channel.send(StatusRequest())
        assert channel.receive(5.0) == Reply(ok=True, text="the operator")
