"""Small models for layout tests, and a strategy for layouts that fit them."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.gpt import GPT
from liver_hpc.recipes.gpt_config import GPTConfig

TIED = gpt_spec(GPTConfig(layers=4, hidden=16, ffn_hidden=24, heads=4, seq_length=8, vocab_size=40))
UNTIED_BF16 = gpt_spec(
    GPTConfig(
        layers=4,
        hidden=16,
        ffn_hidden=24,
        heads=4,
        normalization="layernorm",
        activation="gelu",
        bias=True,
        position="learned",
        tied_embeddings=False,
        seq_length=8,
        vocab_size=40,
        dtype="bf16",
    )
)
MODELS: tuple[ModelSpec, ...] = (TIED, UNTIED_BF16)

SIZES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(Layout, SIZES, SIZES, st.sampled_from([1, 2, 3]))


def state_bytes(model: ModelSpec) -> int:
    """Bytes of one copy of the logical state: parameters and optimizer state."""
    return sum(
        tensor.elements * model.element_bytes(kind, index)
        for index, tensor in enumerate(model.tensors)
        for kind in model.kinds
        if kind == PARAMETER or tensor.role == "trained"
    )


def rank_map(layout: Layout, first: int = 0) -> RankMap:
    """Workers first, first+1, ... in rank order."""
    return RankMap(layout, tuple(range(first, first + layout.workers)))


def gpt_recipe(config: RunConfig) -> GPT:
    """The recipe of a run of a GPT, with its spec by rule: no model is built."""
    recipe = load_recipe(config)
    assert isinstance(recipe, GPT)
    recipe.spec = gpt_spec(recipe.options)
    return recipe
