"""The control channel's in-memory twin, as far as it is posted to."""

from __future__ import annotations

from collections.abc import Sequence

from liver_hpc.protocol.messages import AnyMessage, decode
from liver_hpc.rendezvous.channel import Part


class MemoryChannel:
    """Keeps what is posted, until it breaks."""

    peer = "memory"

    def __init__(self, broken: bool = False) -> None:
        self.posted: list[Part] = []
        self.frames = 0
        self.broken = broken
        self.closed = False

    def post(self, parts: Sequence[Part]) -> None:
        if not self.broken:
            self.posted += parts
            self.frames += 1

    def close(self, reason: str = "") -> None:
        self.closed = True

    @property
    def messages(self) -> list[tuple[int, AnyMessage]]:
        """To whom, and what."""
        return [(part.who, decode(part.data)) for part in self.posted if part.data]
