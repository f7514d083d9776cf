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
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.rendezvous.handshake import PROOF_BYTES, prove

MAX_MESSAGE_BYTES = 64 * 1024

_JOINER, _ACCEPTOR = b"J", b"A"

M = TypeVar("M", bound=BaseModel)

_log = logging.getLogger(__name__)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(_Frozen):
    """Who wants to join: an agent and the number of workers that have booted under it."""

    agent: str
    host: str
    pid: int
    workers: int = Field(gt=0)


class Answer(_Frozen):
    """The joiner is expected: its workers' ids, in their order, and the control address."""

    worker_ids: tuple[int, ...]
    control_host: str
    control_port: int


class Refusal(_Frozen):
    """The joiner is not wanted."""

    reason: str


class Verdict(RootModel[Answer | Refusal]):
    """What the coordinator said, read from JSON."""


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
        identity = _read(Identity, payload, "its identity")
    except MeetingError as error:
        _log.warning("a joiner was turned away: %s", error)
        return b"", None
    try:
        verdict = decide(identity)
    except LiverError as error:
        verdict = Refusal(reason=str(error))
    return _sealed(key, _ACCEPTOR, verdict), identity


def verdict_in(key: bytes, said: bytes) -> Answer | Refusal:
    """What a joiner reads in its reception.

    Raises MeetingError when the acceptor cannot prove that it is the run's.
    """
    complaint = "the rendezvous and this joiner do not hold the same secret"
    payload = _opened(key, _ACCEPTOR, said, complaint)
    return _read(Verdict, payload, "the rendezvous's answer").root


def accepted(verdict: Answer | Refusal, identity: Identity) -> Answer:
    """The answer; raises MeetingError with the reason of a refusal."""
    if isinstance(verdict, Refusal):
        raise MeetingError(f"agent {identity.agent} was refused: {verdict.reason}")
    if len(verdict.worker_ids) != identity.workers:
        raise MeetingError(
            f"agent {identity.agent}: has {identity.workers} workers, was given the ids "
            f"{list(verdict.worker_ids)}"
        )
    return verdict


def _sealed(key: bytes, speaker: bytes, said: BaseModel) -> bytes:
    payload = said.model_dump_json().encode()
    return prove(key, speaker, payload) + payload


def _opened(key: bytes, speaker: bytes, message: bytes, complaint: str) -> bytes:
    proof, payload = message[:PROOF_BYTES], message[PROOF_BYTES:]
    if not hmac.compare_digest(proof, prove(key, speaker, payload)):
        raise MeetingError(complaint)
    return payload


def _read(model: type[M], data: bytes, source: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise MeetingError(f"{source}: {first['msg']}") from None


class Rendezvous(ABC):
    """Where joiners come to; one per coordinator."""

    @abstractmethod
    def start(self, answer: Decide) -> None:
        """Opens the rendezvous; returns once joiners can come.

        `answer` is called for every joiner that holds the secret, one at a time, in any thread;
        a LiverError from it refuses the joiner. Raises MeetingError when it cannot open.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises MeetingError when the rendezvous is broken beyond repair."""

    @abstractmethod
    def close(self) -> None:
        """Closes the rendezvous; nothing of it remains. Idempotent."""
