"""The rendezvous's in-memory twin."""

from __future__ import annotations

import threading

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.base import (
    Answer,
    Decide,
    Identity,
    Rendezvous,
    answer_in,
    introduction,
    reception,
)


class MemoryRendezvous(Rendezvous):
    """Joiners of the same process come by `meet`."""

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
        """From now on nobody is met and `check` raises."""
        self._broken = reason
        self._answer = None

    def meet(self, identity: Identity, secret: bytes) -> Answer:
        """What a joiner does. Raises MeetingError when refused or when the rendezvous is closed."""
        with self._lock:
            answer = self._answer  # it may be closed in the middle
            if answer is None:
                raise MeetingError("the rendezvous is closed")
            said, _ = reception(self._secret, introduction(secret, identity), answer)
        return answer_in(secret, said, identity)
