"""A recipe that notes the rank that a user's code finds in the environment. Loaded by workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from tests.integration.random_tokens import RandomTokenGPT

NOTES = "LIVER_TEST_RANKS"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class NotingGPT(RandomTokenGPT):
    """RandomTokenGPT that writes a line for every loss: its step, and what NAMES say."""

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        return samples, super().fetch(samples, layout, at)

    def loss(self, model: Any, samples: Any) -> tuple[Any, Any]:
        samples, read = samples
        step = int(samples[0]) // self.config.train.global_batch
        told = [os.environ.get(name, "") for name in NAMES]
        with (Path(os.environ[NOTES]) / str(os.getpid())).open("a") as notes:
            print(step, *told, file=notes)
        return super().loss(model, read)
