"""How the two ends of a connection prove to each other that they hold the run's secret, unsaid:

server -> client   greeting, the server's nonce
client -> server   greeting, the client's nonce, the client's proof
server -> client   the server's proof; zeros after a bad proof

A proof is HMAC-SHA256 under the secret over who speaks and both nonces: neither an overheard proof
nor one's own, sent back, proves anything. Both ends take a key of this one connection from it, and
seal what they say from then on: a seal is HMAC-SHA256, cut to SEAL_BYTES, under the speaker's own
key of this connection, over the number of the message and its bytes. What is changed, left out,
said again, sent back or from another connection has another seal.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError

GREETING = b"liver_hpc wire 5\0"
NONCE_BYTES = 32
PROOF_BYTES = 32
ANSWER_BYTES = len(GREETING) + NONCE_BYTES + PROOF_BYTES
SEAL_BYTES = 16

CLIENT, SERVER = b"C", b"S"
_KEY = b"K"
_NUMBER = struct.Struct("!Q")


class ChannelClosed(LiverError):
    """The connection has ended: closed on either side, broken, or closed for bad input."""


class ChannelRefused(ChannelClosed):
    """One side could not prove that it holds the run's secret."""


class Seal:
    """Seals the messages of one speaker on one connection, in their order.

    key: the connection's. speaker: CLIENT or SERVER.
    """

    def __init__(self, key: bytes, speaker: bytes) -> None:
        self._key = prove(key, speaker, b"")
        self._number = 0

    def next(self, *said: bytes) -> bytes:
        """The seal of the next message, whose bytes are given in parts; of SEAL_BYTES."""
        sealed = hmac.digest(self._key, b"".join((_NUMBER.pack(self._number), *said)), "sha256")
        self._number += 1
        return sealed[:SEAL_BYTES]


def prove(secret: bytes, speaker: bytes, said: bytes) -> bytes:
    """The proof, of PROOF_BYTES. `speaker` is one byte, and each of them has another one."""
    return hmac.digest(secret, GREETING + speaker + said, "sha256")


def challenge() -> bytes:
    """What a server says first."""
    return GREETING + secrets.token_bytes(NONCE_BYTES)


def welcome(secret: bytes, challenged: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """The server's proof and the connection's key, for a client's answer of ANSWER_BYTES.

    Raises ChannelRefused for a bad proof, ChannelClosed for who says something else.
    """
    check_greeting(answer)
    nonces = challenged[len(GREETING) :] + answer[len(GREETING) : -PROOF_BYTES]
    _check_proof(answer[-PROOF_BYTES:], prove(secret, CLIENT, nonces))
    return prove(secret, SERVER, nonces), prove(secret, _KEY, nonces)


def introduce(secret: bytes, server: socket.socket, deadline: Deadline) -> bytes:
    """The client's side; returns the connection's key.

    Raises ChannelRefused for a bad proof, ChannelClosed for a server that says something else, and
    OSError or EOFError when it has gone or time runs out.
    """
    check_greeting(_heard(server, len(GREETING), deadline))
    theirs, nonce = _heard(server, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
    nonces = theirs + nonce
    server.sendall(GREETING + nonce + prove(secret, CLIENT, nonces))
    _check_proof(_heard(server, PROOF_BYTES, deadline), prove(secret, SERVER, nonces))
    return prove(secret, _KEY, nonces)


def check_greeting(said: bytes) -> None:
    """Raises ChannelClosed as soon as what was said is no greeting."""
    begins = said[: len(GREETING)]
    if not GREETING.startswith(begins):
        raise ChannelClosed(f"does not speak liver_hpc's protocol: it began with {begins!r}")


def _check_proof(got: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(got, wanted):
        raise ChannelRefused("the two sides do not hold the same secret")


def _heard(peer: socket.socket, size: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < size:
        peer.settimeout(max(deadline.remaining_s(), 1e-3))  # 0 means not to wait at all
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
