"""How the process around a coordinator speaks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liver_hpc.coordinator.loop import Coordinator


class Control:
    """May be used from any thread or signal handler.

    A coordinator that does not stand yet, or that follows after a restart, is told as soon as it
    does. Once the end is near nothing else matters.
    """

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None
        self._stop = ""
        self._end: tuple[str, float] | None = None

    def stop(self, why: str) -> None:
        """The run is to stop at its next step boundary."""
        self._stop = why
        self._tell()

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The coordinator's job ends at `deadline_s` (epoch): state to disk, to go on in another
        job."""
        self._end = (reason, deadline_s)
        self._tell()

    @property
    def steps_done(self) -> int:
        """Of the coordinator that stands; 0 while there is none."""
        return self._coordinator.steps_done if self._coordinator is not None else 0

    def attach(self, coordinator: Coordinator | None) -> None:
        """The coordinator that stands from now on."""
        self._coordinator = coordinator
        self._tell()

    def _tell(self) -> None:
        if self._coordinator is None:
            return
        if self._end is not None:
            self._coordinator.end_near(*self._end)
        elif self._stop:
            self._coordinator.stop(self._stop)
