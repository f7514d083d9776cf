"""Spares that are booted beside training before anybody wants them (`workers.standby`).

Once booted they are as joiners that were kept (`agents.py`): the next handoff takes them first.
"""

from __future__ import annotations

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import Rehearse
from liver_hpc.run import actions as a
from liver_hpc.run.agents import STANDBY
from liver_hpc.run.event_clock import EventClock
from liver_hpc.run.nodes import HeldNodes

MOST_FAILURES = 4
"""So many that come to nothing between two handoffs are the last: a fifth would do no better."""


class Standbys:
    """Sees to it that `workers.standby` spares are there where free slots are, and rehearse.

    They take slots of nodes that the run uses without being asked and would not give back.
    """

    def __init__(
        self, config: RunConfig, clock: EventClock, nodes: HeldNodes, out: list[a.Action]
    ) -> None:
        self._wanted = config.workers.standby
        self._policy = config.policy
        self._boot_s = config.limits.boot_s + config.limits.meet_s
        self._clock = clock
        self._nodes = nodes
        self._agents = nodes.agents
        self._out = out
        self._failures = 0
        self._not_before_s = 0.0
        self._boot_by: Deadline | None = None  # of those that were launched last
        self._rehearsed: dict[int, Layout] = {}

    def look_after(self, layout: Layout) -> None:
        """Launches who is missing, and has all rehearse the layout that trains; there must be no
        handoff in progress."""
        if not self._wanted:
            return
        for worker in self._agents.kept:
            if self._rehearsed.get(worker) != layout:
                self._rehearsed[worker] = layout
                self._agents.send((worker,), Rehearse(layout=str(layout)))
        booting = self._agents.booting(STANDBY)
        if booting and self._boot_by is not None and self._boot_by.expired():
            self._agents.dismiss(STANDBY, "it has not booted in time")
            self.failed(str(self._boot_by.error()))
        if not booting:
            self._launch(layout)

    def _launch(self, layout: Layout) -> None:
        """Not while nodes come that a larger layout may want."""
        now_s = self._clock.now_s()
        if now_s < max(self._not_before_s, self._nodes.granted_s + self._policy.settle_s):
            return
        spare = self._agents.spare(clearing=True)
        missing = self._wanted - len(self._nodes.standbys(clearing=True))
        seats = self._nodes.standby_seats(missing) if self._failures < MOST_FAILURES else []
        if seats:  # in the place of those that have left, or have got a seat
            self._rehearsed = {w: its for w, its in self._rehearsed.items() if w in spare}
            self._boot_by = Deadline.after(self._clock.present, self._boot_s, "standbys to boot")
            self._agents.launch(STANDBY, layout, seats)

    def failed(self, reason: str) -> None:
        """One did not boot, or has died: another one is launched, but not at once."""
        if not self._wanted:
            return
        self._not_before_s = self._clock.now_s() + self._policy.retry_s * 2**self._failures
        self._failures += 1
        last = "; no more are launched" if self._failures == MOST_FAILURES else ""
        self._out.append(a.Note(f"standby: {reason}{last}"))

    def handoff_completed(self) -> None:
        """Spares may have been used up: others are launched, however many have failed."""
        self._failures = 0
