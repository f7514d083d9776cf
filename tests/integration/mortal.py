"""A recipe whose coordinator is killed at chosen moments, or stands still.

`LIVER_TEST_COORDINATOR` is "event:before,event:after": at the first entry of the journal that has
an event of this type the coordinator dies, before it is written, or once it is on the disk and
nothing has come of it yet. Each once in a run. With `LIVER_TEST_STILL` it stops instead.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from liver_hpc.run.journal import Journal
from tests.integration.faulty import FaultyGPT

DEATHS, STILL = "LIVER_TEST_COORDINATOR", "LIVER_TEST_STILL"


class MortalGPT(FaultyGPT):
    """Where a coordinator loads it, that is mortal; workers may have their faults."""


def plant(deaths: list[str]) -> None:
    write = Journal._write

    def die_if(journal: Journal, data: bytes, when: str) -> None:
        for death in deaths:
            event, its = death.split(":")
            done = Path(journal._path.parent / f"died-{event}-{its}")
            if its == when and f'{{"type":"{event}"'.encode() in data and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGSTOP if STILL in os.environ else signal.SIGKILL)

    def writing(journal: Journal, data: bytes) -> None:
        die_if(journal, data, "before")
        write(journal, data)
        die_if(journal, data, "after")

    Journal._write = writing  # type: ignore[method-assign]


if "liver_hpc.coordinator.main" in sys.modules and DEATHS in os.environ:
    plant(os.environ[DEATHS].split(","))
