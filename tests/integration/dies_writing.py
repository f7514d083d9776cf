"""A recipe whose workers have trouble with checkpoints. Loaded by workers only.

`LIVER_TEST_DIES_WRITING` is "worker:step": that worker dies by SIGKILL in the middle of writing its
part of the checkpoint of that step, once in a run. `LIVER_TEST_FILE_BYTES`: no file may become
larger.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

from tests.integration.random_tokens import RandomTokenGPT

BEFORE = 10
"""Boxes that are written before the end."""


class DiesWriting(RandomTokenGPT):
    """RandomTokenGPT with a fault planted in the worker that opens it."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        fault = os.environ.get("LIVER_TEST_DIES_WRITING", "")
        if fault:
            worker, step = fault.split(":")
            plant(int(worker), int(step), run_directory / "has_died_writing")
        most = os.environ.get("LIVER_TEST_FILE_BYTES", "")
        if most:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))


def plant(worker: int, step: int, done: Path) -> None:
    """Wraps the writing of one box, in this process; `done` is a file that says it has happened."""
    from liver_hpc.checkpoint.parts import Save
    from liver_hpc.checkpoint.torch_dist.files import RankWriter

    write = Save.done
    left = [-1]

    def dying_save(self: Any, take: Any) -> Any:
        if (self._worker, self.scalars.step) == (worker, step) and not done.exists():
            done.touch()
            left[0] = BEFORE
        return write(self, take)

    def dying(write: Any) -> Any:
        def dying_write(*arguments: Any) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            write(*arguments)

        return dying_write

    Save.done = dying_save  # type: ignore[method-assign]
    RankWriter.add = dying(RankWriter.add)  # type: ignore[method-assign]
