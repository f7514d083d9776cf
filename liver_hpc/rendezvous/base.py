"""The rendezvous: where joiners meet the coordinator; identities, mutual proof, answer.

Each side of a meeting is pure: bytes in, bytes out. A meeting has two messages:

    joiner -> acceptor   introduction: a proof, its identity
    acceptor -> joiner   reception: a proof, and the answer or the refusal

A proof is that of `handshake.py`, over what is said, under a key that both sides have already: that
of the connection in which the joiner waits for its turn, and of one meeting alone.
"""

from __future__ import annotations

import hmac
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from pydantic import Field, TypeAdapter, ValidationError

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.protocol.messages import Message
from liver_hpc.rendezvous.handshake import PROOF_BYTES, prove

_JOINER, _ACCEPTOR = b"J", b"A"

_log = logging.getLogger(__name__)


class Identity(Message):
    """Who wants to join: an agent and the number of workers that have booted under it, if any."""

    agent: str
    host: str
    workers: int = Field(ge=0)


class Answer(Message):
    """The joiner is expected: its workers' ids, in their order, and the control address."""

    worker_ids: tuple[int, ...]
    control_host: str
    control_port: int


class Refusal(Message):
    """The joiner is not wanted."""

    reason: str


_VERDICT: TypeAdapter[Answer | Refusal] = TypeAdapter(Answer | Refusal)

Decide = Callable[[Identity], Answer | Refusal]
"""The coordinator's decision about a joiner; a LiverError from it is a refusal."""


def introduction(key: bytes, identity: Identity) -> bytes:
    """What a joiner says."""
    return _sealed(key, _JOINER, identity)


def reception(key: bytes, said: bytes, decide: Decide) -> tuple[bytes, Identity | None]:
    """What the acceptor says to a joiner's introduction, and who the joiner is.

    `decide` is only asked about a joiner that has proved that it holds the key. To any other the
    reception proves nothing either: it is empty.
    """
    try:
        payload = _opened(key, _JOINER, said, "it could not prove that it holds the run's secret")
        identity = Identity.model_validate_json(payload)
    except (MeetingError, ValidationError) as error:
        _log.warning("a joiner was turned away: %s", error)
        return b"", None
    try:
        verdict = decide(identity)
    except LiverError as error:
        verdict = Refusal(reason=str(error))
    return _sealed(key, _ACCEPTOR, verdict), identity


def answer_in(key: bytes, said: bytes, identity: Identity) -> Answer:
    """What a joiner reads in its reception.

    Raises MeetingError when the acceptor cannot prove that it is the run's, or refuses the joiner.
    """
    complaint = "the rendezvous and this joiner do not hold the same secret"
    payload = _opened(key, _ACCEPTOR, said, complaint)
    try:
        verdict = _VERDICT.validate_json(payload)
    except ValidationError as error:
        raise MeetingError(f"the rendezvous's answer: {error}") from None
    if isinstance(verdict, Refusal):
        raise MeetingError(f"agent {identity.agent} was refused: {verdict.reason}")
    if len(verdict.worker_ids) != identity.workers:
        raise MeetingError(
            f"agent {identity.agent}: has {identity.workers} workers, was given the ids "
            f"{list(verdict.worker_ids)}"
        )
    return verdict


def _sealed(key: bytes, speaker: bytes, said: Message) -> bytes:
    payload = said.model_dump_json().encode()
    return prove(key, speaker, payload) + payload


def _opened(key: bytes, speaker: bytes, message: bytes, complaint: str) -> bytes:
    proof, payload = message[:PROOF_BYTES], message[PROOF_BYTES:]
    if not hmac.compare_digest(proof, prove(key, speaker, payload)):
        raise MeetingError(complaint)
    return payload


class Rendezvous(ABC):
    """Where joiners come to; one per coordinator."""

    @abstractmethod
    def start(self, answer: Decide) -> None:
        """Opens the rendezvous; returns once joiners can come.

        `answer` is called for every joiner that holds the secret, one at a time, in any thread;
        a LiverError from it refuses the joiner. Raises LiverError when it cannot open; that nobody
        can be met yet is left to `check`.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises MeetingError while the rendezvous is broken: nobody can be met."""

    @abstractmethod
    def close(self) -> None:
        """Closes the rendezvous; nothing of it remains. Idempotent."""
