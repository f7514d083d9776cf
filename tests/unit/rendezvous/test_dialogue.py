"""The dialogue of joiner and desk, as pure functions of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.rendezvous.base import (
    Answer,
    Challenge,
    Identity,
    Introduction,
    Reception,
    Refusal,
    accepted,
    desk_dialogue,
    joiner_dialogue,
)

SECRET = bytes(range(32))
IDENTITY = Identity(agent="a0", host="node1", pid=17, workers=2)
ANSWER = Answer(worker_ids=(4, 5), control_host="node0", control_port=4711)


def meet(
    joiner_secret: bytes = SECRET,
    answer: Callable[[Identity], Answer | Refusal] = lambda identity: ANSWER,
    tamper: Callable[[int, bytes], bytes] = lambda position, data: data,
) -> tuple[Answer | Refusal | MeetingError, Identity | MeetingError]:
    """Runs both sides; what each ended with. `tamper` may change message 0, 1 or 2."""
    joiner, desk = joiner_dialogue(IDENTITY, joiner_secret), desk_dialogue(answer, SECRET)
    seen: list[Answer | Refusal | MeetingError] = []
    assert next(joiner) is None
    challenge = next(desk)
    assert challenge is not None
    assert next(desk) is None
    try:
        introduction = joiner.send(tamper(0, challenge))
    except MeetingError as error:
        return error, MeetingError("never introduced")
    assert introduction is not None
    assert next(joiner) is None
    reception = desk.send(tamper(1, introduction))
    assert reception is not None
    try:
        joiner.send(tamper(2, reception))
    except StopIteration as end:
        seen.append(end.value)
    except MeetingError as error:
        seen.append(error)
    try:
        next(desk)
    except StopIteration as end:
        return seen[0], end.value
    except MeetingError as error:
        return seen[0], error
    raise AssertionError("the desk wants to go on")


def test_both_sides_learn_what_the_other_said() -> None:
    assert meet() == (ANSWER, IDENTITY)


def test_refusal_reaches_the_joiner() -> None:
    refusal = Refusal(reason="not expected")
    assert meet(answer=lambda identity: refusal) == (refusal, IDENTITY)


def test_an_error_of_the_coordinator_is_a_refusal() -> None:
    def answer(identity: Identity) -> Answer:
        raise LiverError("no such agent")

    assert meet(answer=answer) == (Refusal(reason="no such agent"), IDENTITY)


def test_joiner_with_another_secret_is_refused_unasked() -> None:
    def answer(identity: Identity) -> Answer:
        raise AssertionError("asked about a stranger")

    joiner, desk = meet(joiner_secret=b"?" * 32, answer=answer)
    assert isinstance(joiner, MeetingError)
    assert isinstance(desk, MeetingError)
    assert "do not hold the same secret" in str(joiner)
    assert "could not prove" in str(desk)


def test_desk_that_does_not_hold_the_secret_is_not_believed() -> None:
    def forge(position: int, data: bytes) -> bytes:
        if position != 2:
            return data
        answer = Answer(worker_ids=(0, 1), control_host="evil", control_port=1)
        return (
            Reception(payload=answer.model_dump_json(), proof="0" * 64).model_dump_json().encode()
        )

    joiner, _ = meet(tamper=forge)
    assert isinstance(joiner, MeetingError)


@pytest.mark.parametrize(
    ("position", "field"),
    [(0, "nonce"), (1, "nonce"), (1, "payload"), (1, "proof"), (2, "payload"), (2, "proof")],
)
def test_a_change_to_any_field_is_noticed(position: int, field: str) -> None:
    def change(at: int, data: bytes) -> bytes:
        if at != position:
            return data
        message = json.loads(data)
        text = message[field]
        message[field] = text.replace("node", "evil") if field == "payload" else flip(text)
        return json.dumps(message).encode()

    joiner, desk = meet(tamper=change)
    assert isinstance(joiner, MeetingError)
    # The desk cannot know what became of its last message.
    assert isinstance(desk, MeetingError) == (position < 2)


def flip(digits: str) -> str:
    return ("1" if digits[0] == "0" else "0") + digits[1:]


def test_an_overheard_introduction_is_of_no_use_later() -> None:
    overheard: list[bytes] = []

    def listen(position: int, data: bytes) -> bytes:
        if position == 1:
            overheard.append(data)
        return data

    meet(tamper=listen)
    _, desk = meet(tamper=lambda position, data: overheard[0] if position == 1 else data)
    assert isinstance(desk, MeetingError)


def test_a_joiners_own_proof_does_not_pass_as_the_desks() -> None:
    """The speaker is part of the proof: nothing can be reflected."""
    introductions: list[Introduction] = []

    def reflect(position: int, data: bytes) -> bytes:
        if position == 1:
            introductions.append(Introduction.model_validate_json(data))
        if position == 2:
            said = introductions[0]
            return Reception(payload=said.payload, proof=said.proof).model_dump_json().encode()
        return data

    joiner, _ = meet(tamper=reflect)
    assert isinstance(joiner, MeetingError)
    assert "do not hold the same secret" in str(joiner)


def test_two_meetings_never_use_the_same_nonce() -> None:
    nonces: list[str] = []

    def listen(position: int, data: bytes) -> bytes:
        if position < 2:
            model = (Challenge, Introduction)[position]
            nonces.append(model.model_validate_json(data).nonce)
        return data

    for _ in range(3):
        meet(tamper=listen)
    assert len(set(nonces)) == 6


JUNK = st.one_of(
    st.binary(max_size=300),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda nonce, payload, proof: json.dumps(
            {"nonce": nonce, "payload": payload, "proof": proof}
        ).encode(),
        st.text(alphabet="0123456789abcdef \ud800", max_size=70),
        st.text(),
        st.text(),
    ),
)


@given(JUNK)
def test_junk_ends_the_desks_side_with_a_refusal_and_a_meeting_error(junk: bytes) -> None:
    desk = desk_dialogue(lambda identity: ANSWER, SECRET)
    next(desk)
    next(desk)
    refusal = desk.send(junk)
    assert refusal is not None
    assert Reception.model_validate_json(refusal).proof == ""
    with pytest.raises(MeetingError):
        next(desk)


@given(JUNK)
def test_junk_ends_the_joiners_side_with_a_meeting_error(junk: bytes) -> None:
    joiner = joiner_dialogue(IDENTITY, SECRET)
    next(joiner)
    with pytest.raises(MeetingError):
        joiner.send(junk)
    joiner = joiner_dialogue(IDENTITY, SECRET)
    next(joiner)
    joiner.send(Challenge(nonce="00" * 32).model_dump_json().encode())
    next(joiner)
    with pytest.raises(MeetingError):
        joiner.send(junk)


def test_accepted_wants_one_id_per_worker() -> None:
    assert accepted(ANSWER, IDENTITY) == ANSWER
    with pytest.raises(MeetingError, match="agent a0 was refused: full"):
        accepted(Refusal(reason="full"), IDENTITY)
    with pytest.raises(MeetingError, match=r"has 3 workers, was given the ids \[4, 5\]"):
        accepted(ANSWER, IDENTITY.model_copy(update={"workers": 3}))
