"""The handshake over a pair of sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.rendezvous.handshake import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelClosed,
    ChannelRefused,
    introduce,
    prove,
    welcome,
)

SECRET = bytes(range(32))
ANSWER_BYTES = len(GREETING) + NONCE_BYTES + PROOF_BYTES


def soon() -> Deadline:
    return Deadline.after(SystemClock(), 5.0, "the other side")


@dataclass
class Server:
    """What came of the server's side: the key, or the error; admitted: whether it asked."""

    key: bytes = b""
    error: Exception | None = None
    admitted: list[bool] = field(default_factory=list)

    def welcome(self, client: socket.socket) -> None:
        try:
            self.key = welcome(SECRET, soon(), partial(self.admitted.append, True), client)
        except (ChannelClosed, OSError, EOFError) as error:
            self.error = error


@contextmanager
def served() -> Iterator[tuple[Server, socket.socket]]:
    """A server at work, and the client's end of its connection; the server is done on leaving."""
    server, (mine, theirs) = Server(), socket.socketpair()
    with mine, theirs:
        mine.settimeout(5.0)
        thread = threading.Thread(target=server.welcome, args=(theirs,))
        thread.start()
        yield server, mine
        thread.join()


def answer(challenge: bytes, secret: bytes = SECRET) -> bytes:
    nonce = b"c" * NONCE_BYTES
    return GREETING + nonce + prove(secret, b"C", challenge[len(GREETING) :] + nonce)


def test_both_ends_have_one_key_and_the_next_connection_has_another() -> None:
    keys = set()
    for _ in range(2):
        with served() as (server, client):
            key = introduce(SECRET, soon(), client)
        assert key == server.key
        assert server.admitted
        keys.add(key)
    assert len(keys) == 2


def test_an_answer_in_single_bytes_is_returned_the_servers_proof() -> None:
    with served() as (server, client):
        challenge = client.recv(4096)
        for byte in answer(challenge):
            client.send(bytes([byte]))
        nonces = challenge[len(GREETING) :] + b"c" * NONCE_BYTES
        assert client.recv(4096) == prove(SECRET, b"S", nonces)
    assert server.error is None


@pytest.mark.parametrize("place", range(0, ANSWER_BYTES, 5))
def test_a_change_of_any_byte_is_noticed(place: int) -> None:
    with served() as (server, client):
        said = bytearray(answer(client.recv(4096)))
        said[place] ^= 1 + place
        client.sendall(said)
    refused = ChannelRefused if place >= len(GREETING) else ChannelClosed
    assert type(server.error) is refused
    assert not server.admitted


def test_another_secret_is_refused_and_learns_no_proof() -> None:
    with served() as (server, client):
        client.sendall(answer(client.recv(4096), b"?" * 32))
        assert client.recv(4096) == bytes(PROOF_BYTES)
    assert "do not hold the same secret" in str(server.error)
    assert not server.admitted


def test_an_overheard_answer_is_of_no_use_later() -> None:
    with served() as (first, client):
        overheard = answer(client.recv(4096))
        client.sendall(overheard)
    assert first.error is None
    with served() as (second, client):
        client.sendall(overheard)
    assert isinstance(second.error, ChannelRefused)


def test_a_proof_is_of_its_secret_its_speaker_and_what_is_said() -> None:
    nonces = b"n" * 2 * NONCE_BYTES
    proofs = {
        prove(SECRET, b"C", nonces),
        prove(SECRET, b"S", nonces),
        prove(SECRET, b"C", nonces[:-1] + b"m"),
        prove(SECRET, b"C", nonces + b"said"),
        prove(b"?" * 32, b"C", nonces),
    }
    assert len(proofs) == 5
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}
