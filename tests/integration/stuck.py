"""A recipe one of whose workers waits for its data for ever, once in a run. Loaded by workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.integration.random_tokens import RandomTokenGPT

AT_STEP = 6


class StuckGPT(RandomTokenGPT):
    """The worker in slot 1, at AT_STEP."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        self._stuck = run_directory / "is_stuck"

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        is_step = samples[0] // self.config.train.global_batch == AT_STEP
        if is_step and os.environ["LIVER_LOCAL_RANK"] == "1" and not self._stuck.exists():
            self._stuck.touch()
            threading.Event().wait()
        return super().fetch(samples, layout, at)
