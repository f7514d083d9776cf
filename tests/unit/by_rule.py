"""The spec of a GPT by rule, in the place of what a process derives that has to import torch."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.specs import Answer


def by_rule(config: RunConfig) -> ModelSpec:
    return gpt_spec(GPTConfig.model_validate(config.model))


def answer(run: str, derived: str) -> None:
    """What `python -m liver_hpc.worker.derive` does with these words, and its end."""
    spec = by_rule(load_run(Path(run)))
    Path(derived).write_text(Answer[ModelSpec](value=spec).model_dump_json())
    os._exit(0)
