"""The recipe: a pretraining script of Megatron-LM, unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liver_hpc.recipes.base import Derived, Recipe
from liver_hpc.recipes.megatron_lm.options import ScriptOptions


class Pretrain(Recipe):
    """`model:` is a ScriptOptions. Samples are indices into the datasets of the script."""

    Options = ScriptOptions
    options: ScriptOptions

    @classmethod
    def derived(cls, options: Any) -> Mapping[tuple[str, ...], Derived]:
        return {}
