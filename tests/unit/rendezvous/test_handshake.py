"""The handshake: what a server makes of an answer, and a client over a pair of sockets."""

from __future__ import annotations

import socket
import threading

import pytest

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.rendezvous.handshake import (
    ANSWER_BYTES,
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelClosed,
    ChannelRefused,
    challenge,
    check_greeting,
    introduce,
    prove,
    welcome,
)

SECRET = bytes(range(32))


def answer(challenged: bytes, secret: bytes = SECRET) -> bytes:
    nonce = b"c" * NONCE_BYTES
    return GREETING + nonce + prove(secret, b"C", challenged[len(GREETING) :] + nonce)


def test_both_ends_have_one_key_and_the_next_connection_has_another() -> None:
    keys: list[bytes] = []

    def introduce_once() -> None:
        deadline = Deadline.after(SystemClock(), 5.0, "the server")
        keys.append(introduce(SECRET, client, deadline))

    for _ in range(2):
        server, client = socket.socketpair()
        with server, client:
            thread = threading.Thread(target=introduce_once)
            thread.start()
            challenged = challenge()
            server.sendall(challenged)
            proof, key = welcome(SECRET, challenged, server.recv(ANSWER_BYTES))
            server.sendall(proof)
            thread.join()
        assert keys[-1] == key
    assert len(set(keys)) == 2


def test_an_answer_is_returned_the_servers_proof() -> None:
    challenged = challenge()
    proof, _ = welcome(SECRET, challenged, answer(challenged))
    assert proof == prove(SECRET, b"S", challenged[len(GREETING) :] + b"c" * NONCE_BYTES)


@pytest.mark.parametrize("place", range(0, ANSWER_BYTES, 5))
def test_a_change_of_any_byte_is_noticed(place: int) -> None:
    challenged = challenge()
    said = bytearray(answer(challenged))
    said[place] ^= 1 + place
    with pytest.raises(ChannelClosed) as info:
        welcome(SECRET, challenged, bytes(said))
    assert (info.type is ChannelRefused) == (place >= len(GREETING))


def test_another_secret_is_refused() -> None:
    challenged = challenge()
    with pytest.raises(ChannelRefused, match="do not hold the same secret"):
        welcome(SECRET, challenged, answer(challenged, b"?" * 32))


def test_an_overheard_answer_is_of_no_use_later() -> None:
    challenged = challenge()
    overheard = answer(challenged)
    welcome(SECRET, challenged, overheard)
    with pytest.raises(ChannelRefused):
        welcome(SECRET, challenge(), overheard)


def test_another_protocol_is_noticed_as_soon_as_it_differs() -> None:
    for size in range(len(GREETING) + 1):
        check_greeting(GREETING[:size])
    with pytest.raises(ChannelClosed, match="does not speak liver_hpc's protocol: it began with"):
        check_greeting(b"live!")


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
