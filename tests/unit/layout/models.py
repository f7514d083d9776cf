"""Small models for layout tests, and a strategy for layouts that fit them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.gpt import GPT
from liver_hpc.recipes.gpt_config import GPTConfig

EPS = (2, 3, 6)
"""Sizes of expert parallelism that the models' specs know."""


def spec_by_rule(**options: Any) -> ModelSpec:
    """Of a small GPT with these keys of its `model` section, for all of `LAYOUTS`."""
    sizes = {"layers": 4, "hidden": 16, "ffn_hidden": 24, "heads": 4, "seq_length": 8}
    config = GPTConfig.model_validate(sizes | {"vocab_size": 40} | options)
    return gpt_spec(config, vpps=(1, 2), eps=EPS)


def _with_frozen(model: ModelSpec, part: str) -> ModelSpec:
    """The model with all parameters frozen whose names have a part."""
    tensors = tuple(
        replace(tensor, role="frozen") if part in tensor.name else tensor
        for tensor in model.tensors
    )
    return replace(model, tensors=tensors)


TIED = spec_by_rule()
UNTIED_BF16 = spec_by_rule(
    normalization="layernorm",
    activation="gelu",
    bias=True,
    position="learned",
    tied_embeddings=False,
    dtype="bf16",
)
MIXTURE = replace(
    _with_frozen(
        spec_by_rule(
            hidden=8,
            ffn_hidden=16,
            qk_norm=True,
            dtype="bf16",
            experts={
                "number": 6,
                "ffn_hidden": 8,
                "shared_ffn_hidden": 8,
                "layer_freq": [0, 1, 0, 0],
                "score_function": "sigmoid",
                "bias_update_rate": 0.01,
            },
        ),
        "1.self_attention.linear_proj",
    ),
    bucket_elements=300,
    gradient_bytes=2,
)
"""A mixture of experts in one layer, with a buffer and a frozen parameter; its gradients are
reduced in several buckets, in bf16."""
MODELS: tuple[ModelSpec, ...] = (TIED, UNTIED_BF16, MIXTURE)
SIZES = st.sampled_from([1, 2, 4])
MOST_WORKERS = 24


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    """Of at most `MOST_WORKERS` workers, with all axes."""
    tp, pp = draw(SIZES), draw(SIZES)
    dp, cp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    while tp * pp * dp * cp > MOST_WORKERS:
        tp //= 2
    known = [ep for ep in (1, *EPS) if dp * cp % ep == 0]
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    ep, shares_sequence = draw(st.sampled_from(known)), draw(st.booleans())
    return Layout(tp, pp, dp, cp, ep, vpp, sequence_parallel=shares_sequence and tp > 1)


LAYOUTS = _layouts()


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
