"""The handshake, as pure functions of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.rendezvous.handshake import (
    GREETING,
    Challenge,
    ChannelClosed,
    ChannelRefused,
    answer,
)
from liver_hpc.rendezvous.proof import NONCE_BYTES, PROOF_BYTES, prove

SECRET = bytes(range(32))
ANSWER_BYTES = len(GREETING) + NONCE_BYTES + PROOF_BYTES


def hear(challenge: Challenge, said: bytes, cuts: Sequence[int] = ()) -> bytes | None:
    """What the server has to say in the end, when `said` comes in pieces."""
    proof = None
    for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        assert proof is None
        proof = challenge.hear(said[start:end])
    return proof


@given(st.sets(st.integers(1, ANSWER_BYTES - 1)))
def test_an_answer_in_any_pieces_is_returned_the_wanted_proof(cuts: set[int]) -> None:
    challenge = Challenge(SECRET)
    said, wanted = answer(SECRET, challenge.said)
    assert challenge.wants_bytes == len(said)
    assert hear(challenge, said, sorted(cuts)) == wanted
    assert challenge.wants_bytes == 0


@given(st.integers(0, ANSWER_BYTES - 1), st.integers(1, 255))
def test_a_change_of_any_byte_is_noticed(place: int, flip: int) -> None:
    challenge = Challenge(SECRET)
    said = bytearray(answer(SECRET, challenge.said)[0])
    said[place] ^= flip
    refused = ChannelRefused if place >= len(GREETING) else ChannelClosed
    with pytest.raises(refused):
        challenge.hear(bytes(said))


def test_another_secret_is_refused() -> None:
    challenge = Challenge(SECRET)
    with pytest.raises(ChannelRefused, match="do not hold the same secret"):
        challenge.hear(answer(b"?" * 32, challenge.said)[0])


def test_an_overheard_answer_is_of_no_use_later() -> None:
    first = Challenge(SECRET)
    said, _ = answer(SECRET, first.said)
    with pytest.raises(ChannelRefused):
        Challenge(SECRET).hear(said)


def test_another_protocol_is_known_by_its_first_bytes() -> None:
    with pytest.raises(ChannelClosed, match=r"does not speak .* it began with b'GET /'") as info:
        Challenge(SECRET).hear(b"GET /")
    assert not isinstance(info.value, ChannelRefused)


def test_a_proof_is_of_its_purpose_its_speaker_both_nonces_and_what_is_said() -> None:
    nonces = b"n" * 2 * NONCE_BYTES
    proofs = {
        prove(SECRET, b"wire\0", b"C", nonces),
        prove(SECRET, b"meeting\0", b"C", nonces),
        prove(SECRET, b"wire\0", b"S", nonces),
        prove(SECRET, b"wire\0", b"C", nonces[::-1][:-1] + b"m"),
        prove(SECRET, b"wire\0", b"C", nonces, b"said"),
        prove(b"?" * 32, b"wire\0", b"C", nonces),
    }
    assert len(proofs) == 6
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}
