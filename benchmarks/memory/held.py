"""What was resident on one worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Resident bytes of one worker at their highest, above those of a booted one: of a step in
    either world, and of the handoff between them. loss: of the target's first step."""

    source: int
    target: int
    handoff: int
    loss: float
