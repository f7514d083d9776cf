"""What a run is doing, and how it may end."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"  # told to stop, or the first worker has done its last step
    STOPPED = "stopped"
    REQUEUE = "requeue"  # state on disk; the job is to be queued again
    RESTART = "restart"  # state on disk; begun again within the same job
    FINISHED = "finished"
    FAILED = "failed"
