"""The meeting of a joiner with the coordinator's rendezvous: identities, mutual proof, answer.

The dialogue is pure: generators that yield bytes to send, or None to ask for the next message.
MPI and the in-memory twin carry the same bytes:

    desk   -> joiner   Challenge: the desk's nonce
    joiner -> desk     Introduction: its nonce, its identity, its proof
    desk   -> joiner   Reception: the answer or the refusal, the desk's proof

A proof is that of `rendezvous/proof.py`, over the payload.
"""

from __future__ import annotations

import hmac
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.rendezvous.proof import NONCE_BYTES, new_nonce, prove

MAX_DIALOGUE_BYTES = 64 * 1024

_PURPOSE = b"liver_hpc meeting 1\0"
_JOINER = b"J"
_DESK = b"D"

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Dialogue = Generator[bytes | None, bytes, T]


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


class Challenge(_Frozen):
    nonce: str


class Introduction(_Frozen):
    """`payload` is an Identity as JSON."""

    nonce: str
    payload: str
    proof: str


class Reception(_Frozen):
    """`payload` is an Answer or a Refusal as JSON; without proof after a bad proof."""

    payload: str
    proof: str


class Verdict(RootModel[Answer | Refusal]):
    """What the coordinator said, read from JSON."""


def joiner_dialogue(identity: Identity, secret: bytes) -> Dialogue[Answer | Refusal]:
    """The joiner's side; raises MeetingError when the desk cannot prove that it is the run's."""
    challenge = _read(Challenge, (yield None), "the rendezvous's challenge")
    nonce = new_nonce().hex()
    nonces = _nonces(challenge.nonce, nonce, "the rendezvous's challenge")
    payload = identity.model_dump_json()
    proof = _proof(secret, _JOINER, nonces, payload)
    yield Introduction(nonce=nonce, payload=payload, proof=proof).model_dump_json().encode()
    reception = _read(Reception, (yield None), "the rendezvous's answer")
    if not _same(reception.proof, _proof(secret, _DESK, nonces, reception.payload)):
        raise MeetingError("the rendezvous and this joiner do not hold the same secret")
    return _read(Verdict, reception.payload.encode(), "the rendezvous's answer").root


def desk_dialogue(
    answer: Callable[[Identity], Answer | Refusal], secret: bytes
) -> Dialogue[Identity]:
    """The desk's side; returns who it has answered.

    `answer` is only asked about a joiner that has proved that it holds the secret; a LiverError
    that it raises becomes a refusal. A joiner that has not proved it gets a refusal that proves
    nothing either, and MeetingError is raised.
    """
    nonce = new_nonce().hex()
    yield Challenge(nonce=nonce).model_dump_json().encode()
    data = yield None
    try:
        identity, nonces = _check_introduction(data, nonce, secret)
    except MeetingError as error:
        yield _reception(Refusal(reason=str(error)), proof="")
        raise
    try:
        verdict = answer(identity)
    except LiverError as error:
        verdict = Refusal(reason=str(error))
    yield _reception(verdict, _proof(secret, _DESK, nonces, verdict.model_dump_json()))
    return identity


def _check_introduction(data: bytes, nonce: str, secret: bytes) -> tuple[Identity, bytes]:
    """Who the joiner is, and both nonces; raises MeetingError without a proof of the secret."""
    introduction = _read(Introduction, data, "a joiner's introduction")
    nonces = _nonces(nonce, introduction.nonce, "a joiner's introduction")
    if not _same(introduction.proof, _proof(secret, _JOINER, nonces, introduction.payload)):
        raise MeetingError("a joiner could not prove that it holds the run's secret")
    return _read(Identity, introduction.payload.encode(), "a joiner's identity"), nonces


def _reception(verdict: Answer | Refusal, proof: str) -> bytes:
    return Reception(payload=verdict.model_dump_json(), proof=proof).model_dump_json().encode()


def _proof(secret: bytes, speaker: bytes, nonces: bytes, payload: str) -> str:
    return prove(secret, _PURPOSE, speaker, nonces, payload.encode()).hex()


def _same(got: str, wanted: str) -> bool:
    return hmac.compare_digest(got.encode(), wanted.encode())


def _nonces(desk: str, joiner: str, source: str) -> bytes:
    try:
        nonces = bytes.fromhex(desk), bytes.fromhex(joiner)
    except ValueError:
        nonces = b"", b""
    if any(len(nonce) != NONCE_BYTES for nonce in nonces):
        raise MeetingError(f"{source}: wanted a nonce of {2 * NONCE_BYTES} hex digits")
    return nonces[0] + nonces[1]


def _read(model: type[M], data: bytes, source: str) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise MeetingError(f"{source}: {first['msg']}") from None


def converse(
    dialogue: Dialogue[T], send: Callable[[bytes], None], receive: Callable[[], bytes]
) -> T:
    """Runs one side of a dialogue over a transport and returns its result."""
    reply: bytes | None = None
    while True:
        try:
            step = next(dialogue) if reply is None else dialogue.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result
        reply = None
        if step is None:
            reply = receive()
        else:
            send(step)


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
    def start(self, answer: Callable[[Identity], Answer | Refusal]) -> None:
        """Opens the desk; returns once joiners can meet it.

        `answer` is called for every joiner that holds the secret, one at a time, in any thread;
        a LiverError from it refuses the joiner. Raises MeetingError when the desk cannot open.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises MeetingError when the desk is broken beyond repair."""

    @abstractmethod
    def close(self) -> None:
        """Closes the desk; nothing of it remains. Idempotent."""


class MemoryRendezvous(Rendezvous):
    """The in-memory twin: joiners of the same process come by `meet`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._answer: Callable[[Identity], Answer | Refusal] | None = None
        self._broken = ""

    def start(self, answer: Callable[[Identity], Answer | Refusal]) -> None:
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
        """What a joiner does. Raises MeetingError when refused or when the desk is closed."""
        with self._lock:
            answer = self._answer  # the desk may be closed in the middle
            if answer is None:
                raise MeetingError("the rendezvous is closed")
            desk = desk_dialogue(answer, self._secret)
            said: list[bytes] = []

            def receive() -> bytes:
                step = next(desk)
                while step is None:
                    step = desk.send(said.pop(0))
                return step

            try:
                verdict = converse(joiner_dialogue(identity, secret), said.append, receive)
            finally:
                desk.close()
        return accepted(verdict, identity)
