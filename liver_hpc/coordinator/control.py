"""How the process around a coordinator speaks to it."""

from __future__ import annotations

from liver_hpc.clock import SystemClock
from liver_hpc.coordinator.connections import Inbox
from liver_hpc.run.events import EndNear, StopSignalled
from liver_hpc.run.outcome import Outcome


class Control:
    """May be used from any thread or signal handler, also before there is a coordinator: its inbox
    is made first, and goes from one start of the run in this process to the next.

    steps_done: how far the run has come. outcome: how it ended, as soon as that is known.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.steps_done = 0
        self.outcome: Outcome | None = None

    def stop(self, why: str) -> None:
        """The run is to stop at its next step boundary."""
        self.inbox.put(StopSignalled(why))

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The coordinator's job ends at `deadline_s` (epoch): state to disk, to go on in another
        job."""
        self.inbox.put(EndNear(reason, SystemClock().now_s(), deadline_s))
