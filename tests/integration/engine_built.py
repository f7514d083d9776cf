"""A GPT with a part of Transformer Engine, which asks for a GPU as it is built. No module has its
name, or Megatron would take that for the whole of it."""

from __future__ import annotations

import sys
from typing import Any

from liver_hpc.recipes.base import BuildContext
from tests.integration.random_tokens import RandomTokenGPT

ENGINE: dict[str, Any] = {"__name__": "transformer_engine.pytorch", "words": sys.argv}
exec('def build(): assert "--on-gpu" in words, "TransformerEngine needs CUDA."', ENGINE)


class EngineGPT(RandomTokenGPT):
    def build(self, context: BuildContext) -> Any:
        ENGINE["build"]()
        return super().build(context)
