"""Which layers the GPT is made of, and what of its options is refused in words before a run."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.integration.random_tokens import RandomTokenGPT, tiny_config
from tests.integration.toys import build_world, derived


def recipe_with(**model: Any) -> RandomTokenGPT:
    config = tiny_config(**model)
    return RandomTokenGPT(GPTConfig.model_validate(config.model), config)


def layers_chosen(
    implementation: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any]]:
    """With a stand-in for Megatron's search for Transformer Engine, and for its layers."""
    from megatron.core.models.gpt import gpt_layer_specs

    from liver_hpc.recipes import local_layers

    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", installed)
    monkeypatch.setattr(
        gpt_layer_specs,
        "get_gpt_decoder_block_spec",
        lambda _config, **options: calls.append(("te", options)),
    )
    monkeypatch.setattr(local_layers, "local_block", lambda *_args: calls.append(("local", {})))
    recipe = recipe_with(implementation=implementation)

    class Context:
        layout = Layout(1, 2, 1, vpp=2)
        at = layout.coordinate(1)
        vp_stage = 1

    recipe._block(recipe._transformer_config(Context.layout), Context())  # type: ignore[arg-type]
    return calls[0]


@pytest.mark.parametrize(
    ("implementation", "installed", "chosen"),
    [
        ("auto", True, "te"),
        ("auto", False, "local"),
        ("local", True, "local"),
        ("local", False, "local"),
        ("te", True, "te"),
    ],
)
def test_transformer_engine_is_taken_where_it_is_installed(
    implementation: str, installed: bool, chosen: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = layers_chosen(implementation, installed, monkeypatch)
    assert name == chosen
    if name == "te":
        assert options["use_transformer_engine"] is True
        assert (options["pp_rank"], options["vp_stage"]) == (1, 1)


def test_transformer_engine_that_is_missing_is_refused_in_words(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"implementation: te wants Transformer Engine, .* local"):
        derived(recipe_with(implementation="te"), "dp1")


def test_local_layers_norm_queries_and_keys_as_the_configuration_says(device: Any) -> None:
    """Megatron's layers are told beside it, and would silently do without."""
    from megatron.core.transformer.torch_norm import L2Norm

    class Normed(RandomTokenGPT):
        def _transformer_config(self, layout: Layout) -> Any:
            config = super()._transformer_config(layout)
            config.qk_l2_norm = True
            return config

    config = tiny_config()
    world = build_world(Normed(GPTConfig.model_validate(config.model), config), device)
    kinds = [type(part) for chunk in world.chunks for part in chunk.modules()]
    world.close()
    assert kinds.count(L2Norm) == 2 * config.model["layers"]


def test_norms_begin_at_one_whatever_made_them(device: Any) -> None:
    import torch

    from liver_hpc.layout.tensors import TensorSpec

    recipe, generator = recipe_with(), torch.Generator()
    for name, value in {
        "decoder.layers.0.input_layernorm.weight": 1,
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 1,
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias": 0,
        "decoder.final_layernorm.bias": 0,
    }.items():
        assert recipe.initial(TensorSpec(name, (4,)), generator).tolist() == [value] * 4, name


# ---- refused before a run


def test_layers_computed_again_at_a_time_divide_those_of_every_chunk(device: Any) -> None:
    recipe = recipe_with(recompute="full", recompute_num_layers=2)
    recipe.spec = derived(recipe, "pp2", "pp2 vpp2")
    recipe.check_layout(Layout(1, 2, 1))
    with pytest.raises(ConfigError, match="recompute_num_layers 2 does not divide the 1 layers"):
        recipe.check_layout(Layout(1, 2, 1, vpp=2))
    with pytest.raises(PlanError, match="recompute_num_layers 3 does not divide the 4 layers"):
        derived(recipe_with(recompute="full", recompute_num_layers=3), "dp1")


def test_a_sequence_that_context_parallelism_cannot_share_is_refused(device: Any) -> None:
    recipe = recipe_with(seq_length=36)
    recipe.spec = derived(recipe, "cp2", "cp4")
    recipe.check_layout(Layout(1, 1, 1, cp=2))
    with pytest.raises(ConfigError, match="seq_length 36 is not a multiple of 2 cp = 8"):
        recipe.check_layout(Layout(1, 1, 1, cp=4))


def test_chunks_that_the_layers_cannot_fill_are_refused(device: Any) -> None:
    recipe = recipe_with(layers=4)
    recipe.spec = derived(recipe, "pp2 vpp2", "pp2 vpp3", "pp4 vpp2")
    recipe.check_layout(Layout(1, 2, 1, vpp=2))
    for layout in (Layout(1, 2, 1, vpp=3), Layout(1, 4, 1, vpp=2)):
        with pytest.raises(ConfigError, match="layers"):
            recipe.check_layout(layout)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_shares_of_a_sequence_are_megatrons_own(
    cp: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    from liver_hpc.recipes.local_attention import share_of_sequence

    class Group:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = lambda: rank, lambda: cp

    # How the releases ask: the group itself, or torch.distributed.
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    hybrid = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    plain = partial(get_batch_on_this_cp_rank, **{"is_hybrid_cp": False} if hybrid else {})
    tokens = torch.arange(2 * 16).view(2, 16)
    for rank in range(cp):
        (ours,) = share_of_sequence(Group(rank), tokens)
        theirs = plain({"tokens": tokens}, cp_group=Group(rank))["tokens"]
        assert torch.equal(ours, theirs)


def test_a_mask_is_refused_where_the_attention_makes_it(device: Any) -> None:
    import torch

    from tests.integration.toys import build_world

    recipe = recipe_with()
    world = build_world(recipe, device)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    try:
        with pytest.raises(ValueError, match="give the model None"):
            world.chunks[0](tokens, tokens, mask)
    finally:
        world.close()
