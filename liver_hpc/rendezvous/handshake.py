"""What the two ends of a connection say before its first message, as pure functions of bytes:

server -> client   greeting, the server's nonce
client -> server   greeting, the client's nonce, the client's proof
server -> client   the server's proof; zeros after a bad proof
"""

from __future__ import annotations

import hmac

from liver_hpc.errors import LiverError
from liver_hpc.rendezvous.proof import NONCE_BYTES, PROOF_BYTES, new_nonce, prove

GREETING = b"liver_hpc wire 1\0"
CHALLENGE_BYTES = len(GREETING) + NONCE_BYTES
REFUSAL = bytes(PROOF_BYTES)

_ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
_CLIENT, _SERVER = b"C", b"S"


class ChannelClosed(LiverError):
    """The connection has ended: closed on either side, broken, or closed for bad input."""


class ChannelRefused(ChannelClosed):
    """One side could not prove that it holds the run's secret."""


class Challenge:
    """The server's side with one client."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = new_nonce()
        self._heard = b""

    @property
    def said(self) -> bytes:
        return GREETING + self._nonce

    @property
    def wants_bytes(self) -> int:
        """How much of the client's answer is still to come."""
        return _ANSWER_BYTES - len(self._heard)

    def hear(self, part: bytes) -> bytes | None:
        """Takes what came, no more than is wanted; at the end of a good answer the server's proof.

        Raises ChannelRefused for a bad proof, ChannelClosed for a client that says something else.
        """
        self._heard += part
        check_greeting(self._heard)
        if self.wants_bytes:
            return None
        nonces = self._nonce + self._heard[len(GREETING) : CHALLENGE_BYTES]
        wanted = prove(self._secret, GREETING, _CLIENT, nonces)
        check_proof(self._heard[CHALLENGE_BYTES:], wanted)
        return prove(self._secret, GREETING, _SERVER, nonces)


def answer(secret: bytes, challenge: bytes) -> tuple[bytes, bytes]:
    """The client's side: what to say to a challenge, and the proof that must come in return."""
    nonce = new_nonce()
    nonces = challenge[len(GREETING) :] + nonce
    said = GREETING + nonce + prove(secret, GREETING, _CLIENT, nonces)
    return said, prove(secret, GREETING, _SERVER, nonces)


def check_greeting(said: bytes) -> None:
    """Raises ChannelClosed as soon as `said` cannot be the beginning of a handshake."""
    if not GREETING.startswith(said[: len(GREETING)]):
        raise ChannelClosed(f"does not speak liver_hpc's protocol: it began with {said!r}")


def check_proof(got: bytes, wanted: bytes) -> None:
    """Raises ChannelRefused where they differ."""
    if not hmac.compare_digest(got, wanted):
        raise ChannelRefused("the two sides do not hold the same secret")
