"""The rendezvous: where joiners meet the coordinator; identities, mutual proof, answer.

Each side of a meeting is pure: bytes in, bytes out. MPI and the in-memory twin carry the same three
messages:

    acceptor -> joiner   challenge: a nonce
    joiner -> acceptor   introduction: its own nonce, a proof, its identity
    acceptor -> joiner   reception: a proof, and the answer or the refusal

A proof is that of `proof.py`, over what is said.
"""

from __future__ import annotations

import hmac
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.rendezvous.proof import NONCE_BYTES, PROOF_BYTES, new_nonce, prove

MAX_MESSAGE_BYTES = 64 * 1024

_PURPOSE = b"liver_hpc meeting 2\0"
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


@dataclass(frozen=True)
class _Seal:
    """Proofs within one meeting. nonces: the acceptor's and the joiner's, each of fixed length, so
    that no two inputs of a proof read the same."""

    secret: bytes
    nonces: bytes

    def close(self, speaker: bytes, said: BaseModel) -> bytes:
        payload = said.model_dump_json().encode()
        return self._proof(speaker, payload) + payload

    def open(self, speaker: bytes, message: bytes, complaint: str) -> bytes:
        """What was said; raises MeetingError with the complaint where the proof is wrong."""
        proof, payload = message[:PROOF_BYTES], message[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(speaker, payload)):
            raise MeetingError(complaint)
        return payload

    def _proof(self, speaker: bytes, payload: bytes) -> bytes:
        return prove(self.secret, _PURPOSE, speaker, self.nonces, payload)


class JoinerSide:
    """A joiner in one meeting; `introduction` is what it sends.

    Raises MeetingError when the challenge is none.
    """

    def __init__(self, identity: Identity, secret: bytes, challenge: bytes) -> None:
        if len(challenge) != NONCE_BYTES:
            raise MeetingError(
                f"the rendezvous's challenge has {len(challenge)} bytes, wanted {NONCE_BYTES}"
            )
        nonce = new_nonce()
        self._seal = _Seal(secret, challenge + nonce)
        self.introduction = nonce + self._seal.close(_JOINER, identity)

    def verdict(self, reception: bytes) -> Answer | Refusal:
        """Raises MeetingError when the acceptor cannot prove that it is the run's."""
        complaint = "the rendezvous and this joiner do not hold the same secret"
        payload = self._seal.open(_ACCEPTOR, reception, complaint)
        return _read(Verdict, payload, "the rendezvous's answer").root


class AcceptorSide:
    """The acceptor in one meeting. identity: who has come, once that is proved."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.challenge = new_nonce()
        self.identity: Identity | None = None

    def receive(self, introduction: bytes, decide: Decide) -> bytes:
        """The reception of a joiner.

        `decide` is only asked about a joiner that has proved that it holds the secret. To any other
        the reception proves nothing either: it is empty.
        """
        nonce, message = introduction[:NONCE_BYTES], introduction[NONCE_BYTES:]
        seal = _Seal(self._secret, self.challenge + nonce)
        complaint = "it could not prove that it holds the run's secret"
        try:
            payload = seal.open(_JOINER, message, complaint)
            self.identity = _read(Identity, payload, "its identity")
        except MeetingError as error:
            _log.warning("a joiner was turned away: %s", error)
            return b""
        try:
            verdict = decide(self.identity)
        except LiverError as error:
            verdict = Refusal(reason=str(error))
        return seal.close(_ACCEPTOR, verdict)


def _read(model: type[M], data: bytes, source: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise MeetingError(f"{source}: {first['msg']}") from None


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


class MemoryRendezvous(Rendezvous):
    """The in-memory twin: joiners of the same process come by `meet`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._answer: Decide | None = None
        self._broken = ""

    def start(self, answer: Decide) -> None:
        self._answer = answer

    def check(self) -> None:
        if self._broken:
            raise MeetingError(f"the rendezvous is broken: {self._broken}")

    def close(self) -> None:
        self._answer = None

    def break_down(self, reason: str) -> None:
        """From now on nobody is met and `check` raises; for tests."""
        self._broken = reason
        self._answer = None

    def meet(self, identity: Identity, secret: bytes) -> Answer:
        """What a joiner does. Raises MeetingError when refused or when the rendezvous is closed."""
        with self._lock:
            answer = self._answer  # it may be closed in the middle
            if answer is None:
                raise MeetingError("the rendezvous is closed")
            acceptor = AcceptorSide(self._secret)
            joiner = JoinerSide(identity, secret, acceptor.challenge)
            verdict = joiner.verdict(acceptor.receive(joiner.introduction, answer))
        return accepted(verdict, identity)
