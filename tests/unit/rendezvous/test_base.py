"""The two sides of a meeting, as pure functions of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.rendezvous.base import (
    Answer,
    Identity,
    Refusal,
    answer_in,
    introduction,
    reception,
)

KEY = bytes(range(32))
IDENTITY = Identity(agent="a0", host="node1", workers=2)
ANSWER = Answer(worker_ids=(4, 5), control_host="node0", control_port=4711)

Met = tuple[Answer | MeetingError, Identity | None]


def meet(
    joiner_key: bytes = KEY,
    answer: Callable[[Identity], Answer | Refusal] = lambda identity: ANSWER,
    tamper: Callable[[int, bytes], bytes] = lambda position, data: data,
) -> Met:
    """What the joiner ended with, and whom the acceptor believes to have met.

    `tamper` may change message 0 or 1.
    """
    said, met = reception(KEY, tamper(0, introduction(joiner_key, IDENTITY)), answer)
    try:
        return answer_in(joiner_key, tamper(1, said), IDENTITY), met
    except MeetingError as error:
        return error, met


def test_both_sides_learn_what_the_other_said() -> None:
    assert meet() == (ANSWER, IDENTITY)


def test_refusal_reaches_the_joiner() -> None:
    refused, met = meet(answer=lambda identity: Refusal(reason="not expected"))
    assert isinstance(refused, MeetingError)
    assert (str(refused), met) == ("agent a0 was refused: not expected", IDENTITY)


def test_an_error_of_the_coordinator_is_a_refusal() -> None:
    def answer(identity: Identity) -> Answer:
        raise LiverError("no such agent")

    refused, met = meet(answer=answer)
    assert isinstance(refused, MeetingError)
    assert (str(refused), met) == ("agent a0 was refused: no such agent", IDENTITY)


def test_joiner_with_another_key_is_turned_away_unasked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(identity: Identity) -> Answer:
        raise AssertionError("asked about a stranger")

    with caplog.at_level(logging.WARNING):
        said, met = meet(joiner_key=b"?" * 32, answer=answer)
    assert isinstance(said, MeetingError)
    assert "do not hold the same secret" in str(said)
    assert met is None
    assert "could not prove that it holds the run's secret" in caplog.text


def test_acceptor_that_does_not_hold_the_key_is_not_believed() -> None:
    forged = Answer(worker_ids=(0, 1), control_host="evil", control_port=1).model_dump_json()
    said, _ = meet(tamper=lambda at, data: bytes(32) + forged.encode() if at == 1 else data)
    assert isinstance(said, MeetingError)


@given(st.integers(0, 1), st.data())
def test_a_change_to_any_byte_is_noticed(position: int, data: st.DataObject) -> None:
    def change(at: int, message: bytes) -> bytes:
        if at != position:
            return message
        where = data.draw(st.integers(0, len(message) - 1))
        flipped = message[where] ^ data.draw(st.integers(1, 255))
        return message[:where] + bytes([flipped]) + message[where + 1 :]

    said, met = meet(tamper=change)
    assert isinstance(said, MeetingError)
    # The acceptor cannot know what became of its last message.
    assert (met is None) == (position == 0)


@given(st.integers(0, 1), st.data())
def test_a_message_that_is_cut_or_grows_is_noticed(position: int, data: st.DataObject) -> None:
    def change(at: int, message: bytes) -> bytes:
        if at != position:
            return message
        return message[: data.draw(st.integers(0, len(message) - 1))] or message + b"x"

    said, _ = meet(tamper=change)
    assert isinstance(said, MeetingError)


def test_an_overheard_introduction_is_of_no_use_in_another_place_of_the_queue() -> None:
    overheard = introduction(b"another connection's key", IDENTITY)
    assert reception(KEY, overheard, lambda identity: ANSWER) == (b"", None)


def test_a_joiners_own_proof_does_not_pass_as_the_acceptors() -> None:
    """The speaker is part of the proof: nothing can be reflected."""
    with pytest.raises(MeetingError, match="do not hold the same secret"):
        answer_in(KEY, introduction(KEY, IDENTITY), IDENTITY)


@given(st.binary(max_size=300))
def test_junk_from_a_joiner_gets_an_empty_reception(junk: bytes) -> None:
    assert reception(KEY, junk, lambda identity: ANSWER) == (b"", None)


@given(st.binary(max_size=300))
def test_junk_from_an_acceptor_is_a_meeting_error(junk: bytes) -> None:
    with pytest.raises(MeetingError, match="do not hold the same secret"):
        answer_in(KEY, junk, IDENTITY)


def test_an_answer_has_one_id_per_worker() -> None:
    short = Answer(worker_ids=(4,), control_host="node0", control_port=4711)
    error, _ = meet(answer=lambda identity: short)
    assert isinstance(error, MeetingError)
    assert str(error) == "agent a0: has 2 workers, was given the ids [4]"
