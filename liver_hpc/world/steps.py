"""What the workers of a world tell one another of a step, and what they know after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Flags(NamedTuple):
    """What one worker tells the others at the end of a step: it is armed, it was asked to stop, the
    last snapshot is complete here, and what that took, in steps, or it has failed here; it would
    have a checkpoint now. Of all of them: the sums."""

    ready: float = 0
    stop: float = 0
    snapshot: float = 0
    snapshot_steps: float = 0
    snapshot_failed: float = 0
    checkpoint: float = 0


@dataclass(frozen=True)
class StepResult:
    """What all workers of a world know after a step. raised: by all of them. metrics: what the
    recipe told beside the loss, and auxiliary losses."""

    loss: float
    grad_norm: float
    learning_rate: float
    raised: Flags
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Gradients:
    """What a pass over micro-batches gave on this worker: the sum of their losses, each times what
    it weighs, and the sum of what they weigh: 1, or its tokens where the recipe tells them. Both
    are 0 except on the last stage's first tensor-parallel rank; what they weigh is on the first
    context-parallel rank alone. metrics: the same two sums of whatever else the recipe told, and,
    of any worker, of auxiliary losses."""

    loss_sum: float
    weight: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
