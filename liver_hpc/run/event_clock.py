"""The time in which a run's core lives: that of its events."""

from __future__ import annotations


class EventClock:
    """The time of the event that is being handled.

    present: the clock of deadlines, which stands still while the run has no coordinator, or one
    that does nothing.
    """

    def __init__(self) -> None:
        self.at_s = 0.0
        self.present = PresentClock(self)

    def now_s(self) -> float:
        return self.at_s


class PresentClock:
    """The time of another clock less that in which no coordinator did anything.

    absent_since_s: since when there is none; None while there is one.
    """

    def __init__(self, clock: EventClock) -> None:
        self._clock = clock
        self._absent_s = 0.0
        self.absent_since_s: float | None = None

    def now_s(self) -> float:
        since_s = self.absent_since_s
        return (self._clock.at_s if since_s is None else since_s) - self._absent_s

    def stands_still(self, since_s: float) -> None:
        """There is no coordinator, since then; or since before, if one has come and gone."""
        if self.absent_since_s is None:
            self.absent_since_s = since_s

    def goes_on(self) -> float:
        """There is one again; seconds that there was none."""
        assert self.absent_since_s is not None
        absent_s = self.leave_out(self.absent_since_s)
        self.absent_since_s = None
        return absent_s

    def leave_out(self, since_s: float) -> float:
        """The time since then does not count; seconds of it."""
        for_s = self._clock.at_s - since_s
        self._absent_s += for_s
        return for_s
