"""A GPT recipe on random tokens, for tests that need no data files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.schema import RunConfig
from liver_hpc.recipes.gpt import GPT
from liver_hpc.recipes.gpt_config import GPTConfig


class RandomTokens:
    """Sample i is a function of i: tokens that are partly predictable from the one before."""

    def __init__(self, seq_length: int, vocab_size: int) -> None:
        self._seq_length = seq_length
        self._vocab_size = vocab_size

    def sample(self, index: int) -> tuple[Any, Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(index)
        shape = (self._seq_length + 1,)
        tokens = torch.randint(0, self._vocab_size, shape, generator=generator)
        tokens[1::2] = (tokens[:-1:2] * 3 + 1) % self._vocab_size
        return tokens[:-1], tokens[1:], torch.ones(self._seq_length)


class RandomTokenGPT(GPT):
    """GPT whose `open` needs no files.

    `LIVER_TEST_STEP_S` makes every step take that much longer, so that a run of tiny steps lasts
    until its joiners have booted.
    """

    def _check_data_keys(self) -> None:
        pass

    def check_data(self) -> None:
        pass

    def open(self, run_directory: Path) -> None:
        self._samples = RandomTokens(self.options.seq_length, self.options.vocab_size)  # type: ignore[assignment]
        self._step_s = float(os.environ.get("LIVER_TEST_STEP_S", "0"))

    def batch(self, step: int) -> Sequence[Any]:
        time.sleep(self._step_s)
        return super().batch(step)


def tiny_config(**model: Any) -> RunConfig:
    """A run of a model that steps in about 20 ms."""
    sizes = {"layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4, "query_groups": 2}
    sizes |= {"seq_length": 32, "vocab_size": 128}
    return RunConfig.model_validate(
        {
            "recipe": "tests.integration.random_tokens:RandomTokenGPT",
            "train": {"steps": 100, "global_batch": 8, "micro_batch": 1},
            "workers": {"initial": 1, "max": 8},
            "layouts": {1: {"dp": 1}},
            "model": sizes | model,
            "handoff": {"staging_bytes": 1 << 18, "bucket_bytes": 1 << 16},
        }
    )


def tiny_recipe(**model: Any) -> RandomTokenGPT:
    """The recipe of `tiny_config`, opened."""
    config = tiny_config(**model)
    recipe = RandomTokenGPT(GPTConfig.model_validate(config.model), config)
    recipe.spec = gpt_spec(recipe.options)
    recipe.open(Path())
    return recipe
