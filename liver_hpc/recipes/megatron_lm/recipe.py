"""The recipe: a pretraining script of Megatron-LM, unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liver_hpc.config.completion import Derived
from liver_hpc.config.problems import KeyPath
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.megatron_lm.arguments import derived_from, notes_of
from liver_hpc.recipes.megatron_lm.options import ScriptOptions


class Pretrain(Recipe):
    """`model:` is a ScriptOptions. Samples are indices into the datasets of the script."""

    Options = ScriptOptions
    options: ScriptOptions

    @classmethod
    def derived(cls, options: Any) -> Mapping[KeyPath, Derived]:
        return derived_from(options.words)

    @classmethod
    def notes(cls, options: Any) -> Sequence[str]:
        return notes_of(options.words)
