"""What a run is doing, and how it may end."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """Where a start of the run stands."""

    STARTING = "starting"
    TRAINING = "training"
    HANDING_OVER = "handing over"  # the source world trains on for most of it
    STOPPING = "stopping"  # told to stop, or the first worker has done its last step
    ENDED = "ended"


class Ending(StrEnum):
    """How a start of the run ended."""

    STOPPED = "stopped"
    REQUEUE = "requeue"  # state on disk; the job is to be queued again
    RESTART = "restart"  # state on disk; begun again within the same job
    FINISHED = "finished"
    FAILED = "failed"
