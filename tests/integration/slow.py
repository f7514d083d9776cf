"""A recipe of whose workers one is slow. Loaded by workers only."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.integration.random_tokens import RandomTokenGPT

SLOW = "LIVER_TEST_SLOW"
"""As "1:0.2": each forward of worker 1 takes that many seconds longer."""


class SlowGPT(RandomTokenGPT):
    """RandomTokenGPT that sleeps in the forward of one worker, and computes the same."""

    def loss(self, model: Any, samples: Any) -> tuple[Any, Any]:
        from torch import distributed

        worker, seconds = os.environ[SLOW].split(":")
        if distributed.get_rank() == int(worker):
            time.sleep(float(seconds))
        return super().loss(model, samples)
