"""The status snapshot: what `liver status` prints and `--follow` draws."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class HandoffStatus(BaseModel):
    """The handoff in progress. Times are epoch seconds; bytes count both phases of TRANSFER."""

    model_config = ConfigDict(frozen=True)

    generation: int
    phase: str
    source: str
    target: str
    notice: str
    since_s: float
    bytes_done: int
    bytes_total: int
    waiting_for: tuple[int, ...]


class StatusSnapshot(BaseModel):
    """The state of a run at one moment; NaN and infinity are strings in its JSON. Handoffs are
    those of this start of the run; with one that failed its world was lost."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    run: str
    state: str  # of `RunState`; once the run has ended, of `Ending`
    step: int
    steps: int
    loss: float | None
    grad_norm: float | None
    tokens_per_s: float | None
    step_s: float | None
    generation: int
    layout: str
    workers: tuple[int, ...]
    handoffs_done: int
    handoffs_aborted: int
    queued: tuple[str, ...]
    handoff: HandoffStatus | None
    last_event: str
    journal_error: str
    now_s: float
    nodes: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    validation_loss: float | None = None
    evaluated: int = 0  # after how many steps
    spares: tuple[int, ...] = ()  # booted, without a seat
    observed: int = 0  # what it would have done, how often; the newest is `would_have`
    would_have: str = ""
    left_s: float | None = None  # of training, at the last step's speed
    handoffs_failed: int = 0
    checkpointed: int | None = None  # the step of the newest checkpoint
    checkpoint_error: str = ""  # why the one after it has come to nothing
