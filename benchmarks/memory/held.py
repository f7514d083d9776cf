"""What was resident on one worker, and what it held in the end."""

from __future__ import annotations

from dataclasses import dataclass

from liver_hpc.protocol.messages import ClassDigest


@dataclass(frozen=True)
class Held:
    """Resident bytes of one worker at their highest, above those of a booted one: of a step in
    either world, and of the handoff between them. loss: of the target's first step; digests: of
    its state after that one and another."""

    source: int
    target: int
    handoff: int
    loss: float
    digests: tuple[ClassDigest, ...]
