"""The GPT whose steps take a while, so that joiners have room beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from liver_hpc.recipes.gpt import GPT

PAUSE = "LIVER_BENCHMARK_PAUSE_S"


class PacedGPT(GPT):
    """GPT, with so many seconds before each batch as the environment says."""

    def batch(self, step: int) -> Sequence[Any]:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        return super().batch(step)
