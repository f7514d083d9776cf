"""Work beside the thread that trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError
from liver_hpc.world.context import FAILURES
from liver_hpc.world.device import Device

Result = TypeVar("Result")


class Beside(threading.Thread, Generic[Result]):
    """Work in a thread and a lane of its own, after all that the calling thread has launched, whose
    failure is raised at `outcome`.

    Not a Future: that one keeps the failure's traceback, and with it the group's connections; and
    the interpreter waits at its end for every thread of a pool, also for one that is stuck.
    """

    def __init__(self, name: str, work: Callable[[], Result], device: Device) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._device = device
        self._lane = device.new_lane()
        self._lane.follow()
        self._results: list[Result] = []
        self._failure = ""
        self.start()

    def run(self) -> None:
        self._device.enter()
        try:
            with self._lane.entered():
                self._results.append(self._work())
        except FAILURES as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            del self._work  # and with it the worlds, which others close

    def outcome(self, deadline: Deadline) -> Result:
        """What the work returned. Raises LiverError where it failed, DeadlineError."""
        self.join(deadline.remaining_s())
        if self._failure:
            raise LiverError(self._failure)
        if not self._results:
            raise deadline.error()
        return self._results[0]
