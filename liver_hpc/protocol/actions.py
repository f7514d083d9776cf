"""What the handoff machine asks for; the coordinator performs them in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import ToWorker


@dataclass(frozen=True)
class LaunchJoiners:
    """Start this many fresh workers; each says Hello when it has booted."""

    generation: int
    count: int
    layout: Layout


@dataclass(frozen=True)
class Send:
    """One message to each of these workers."""

    workers: tuple[int, ...]
    message: ToWorker


@dataclass(frozen=True)
class Keep:
    """The attempt is off for no fault of these joiners: another one may have them, once they have
    answered the Abort, if they were sent one."""

    joiners: tuple[int, ...]
    aborting: bool


@dataclass(frozen=True)
class Ended:
    """The attempt is over; `world` trains from here on, or is lost where it has failed.

    `detail` is empty for a completed handoff, else what went wrong. "failed": a recovery, or a
    start from the newest checkpoint, has to follow.
    """

    generation: int
    outcome: Literal["completed", "aborted", "failed"]
    detail: str
    world: WorldRef


Action = LaunchJoiners | Send | Keep | Ended
