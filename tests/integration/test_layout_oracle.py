"""The pure layout against megatron-core itself: what its modules and optimizer really hold.

Worlds are built on stand-in groups, so that one process can take every seat of every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.tensors import PARAMETER, Box
from liver_hpc.recipes.gpt import GPT
from tests.integration.toys import derived
from tests.unit.layout.models import gpt_recipe

MODELS = {
    "tied-swiglu-gqa": {"heads": 8, "query_groups": 4, "dtype": "fp32"},
    "untied-gelu-bias-bf16": {
        "heads": 4,
        "activation": "gelu",
        "normalization": "layernorm",
        "bias": True,
        "position": "learned",
        "tied_embeddings": False,
        "dtype": "bf16",
    },
}
UNEVEN = {"heads": 4, "layers": 7, "vocab_size": 256}
# The local layer spec writes its norms under the names of Transformer Engine's fused layers.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
GRID = [Layout(*sizes) for sizes in itertools.product((1, 2, 4), repeat=3)]


def recipe_of(model: dict[str, Any]) -> GPT:
    sizes = {"layers": 4, "hidden": 32, "ffn_hidden": 48, "seq_length": 8, "vocab_size": 64}
    config = RunConfig.model_validate(
        {
            "train": {"steps": 4, "global_batch": 4},
            "workers": {"initial": 1, "max": 64},
            "layouts": {1: {"dp": 1}},
            "model": sizes | model,
            "data": {"prefix": "unread"},
        }
    )
    return gpt_recipe(config)


def worlds(recipe: GPT, layout: Layout, device: Any) -> Iterator[Any]:
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World

    rank_map = RankMap(layout, tuple(range(layout.workers)))
    for worker in rank_map.workers:
        install_sentinel(worker)
        world = World(recipe, rank_map, worker, generation=0, device=device)
        try:
            yield world
        finally:
            world.close()


def megatron_boxes(world: Any) -> dict[str, set[Box]]:
    """The boxes of `sharded_state_dict`, by our names; layers' axis folded into the name."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from liver_hpc.world.thread import groups_in_use

    groups = world.groups
    metadata = {"dp_cp_group": groups.dp_cp, "dp_cp_group_gtp_remat": groups.dp_cp}
    modules = [getattr(chunk.module, "module", chunk.module) for chunk in world.chunks]
    found: dict[str, set[Box]] = {}

    def take(item: Any) -> None:
        if isinstance(item, ShardedTensorFactory):
            take(item.build())
        elif isinstance(item, dict):
            for value in item.values():
                take(value)
        elif isinstance(item, list | tuple):
            for value in item:
                take(value)
        elif isinstance(item, ShardedTensor):
            name, offset = item.key, list(item.global_offset)
            if item.prepend_axis_num:
                name = name.replace("decoder.layers.", f"decoder.layers.{offset.pop(0)}.")
            for fused, plain in FUSED_NORMS.items():
                name = name.replace(fused, plain)
            shape = list(item.local_shape)
            row0, col0 = offset[0], offset[1] if len(offset) > 1 else 0
            cols = shape[1] if len(shape) > 1 else 1
            found.setdefault(name, set()).add(Box(row0, row0 + shape[0], col0, col0 + cols))

    with groups_in_use(groups):
        for module in modules:
            take(module.sharded_state_dict(metadata=metadata))
    return found


def same_elements(ours: set[Box], theirs: set[Box]) -> bool:
    """Whether two sets of disjoint boxes cover the same elements; theirs may be cut finer."""
    inside = all(any(box.intersect(own) == box for own in ours) for box in theirs)
    return inside and sum(b.elements for b in ours) == sum(b.elements for b in theirs)


def compare_parameters(world: Any) -> int:
    """Compares each tensor's boxes with Megatron's; returns how many tensors there are."""
    spec, layout, theirs = world.recipe.spec, world.rank_map.layout, megatron_boxes(world)
    indices = spec.held_tensors(layout, world.at)
    for index in indices:
        name = spec.tensors[index].name
        ours = set(owned_boxes(spec, layout, world.at, PARAMETER, index))
        assert same_elements(ours, theirs[name]), (layout, world.at, name)
    return len(indices)


@pytest.fixture
def of_the_first_replica(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tied embeddings the last stage asks parallel_state for its data-parallel rank."""
    from megatron.core import parallel_state

    from liver_hpc.world import module_globals

    module_globals.answer_per_world(parallel_state)  # for good, of its own functions
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda **_k: 0)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("of_the_first_replica")
@pytest.mark.parametrize("name", MODELS)
def test_parameter_and_optimizer_boxes_are_megatrons_own(name: str, device: Any) -> None:
    """Over the grid: parameters against sharded_state_dict; the optimizer's flat intervals
    against gbuf_ranges (World construction compares them and raises PlanError)."""
    recipe = recipe_of(MODELS[name])
    compared = 0
    for layout in GRID:
        for world in worlds(recipe, layout, device):
            compared += compare_parameters(world)
    assert compared > 2000


@pytest.mark.usefixtures("of_the_first_replica")
@pytest.mark.parametrize("bucket_elements", [None, 3000])
def test_derived_boxes_are_megatrons_own_with_chunks_cp_and_buckets(
    bucket_elements: int | None, device: Any
) -> None:
    """As above; gradient buckets as they are where their reduction overlaps the backward."""
    recipe = recipe_of(MODELS["tied-swiglu-gqa"])
    if bucket_elements is not None:
        overlap = {"overlap_grad_reduce": True, "bucket_elements": bucket_elements}
        update = {"train": recipe.config.train.model_copy(update=overlap)}
        recipe.config = recipe.config.model_copy(update=update)
    sizes = itertools.product((1, 2), repeat=5)
    grid = [Layout(tp, pp, dp, cp, vpp=vpp) for tp, pp, dp, cp, vpp in sizes if vpp == 1 or pp == 2]
    recipe.spec = derived(recipe, *map(str, grid))
    assert recipe.spec.bucket_elements == bucket_elements
    compared, buckets = 0, set()
    for layout in grid:
        for world in worlds(recipe, layout, device):
            compared += compare_parameters(world)
            buckets.add(len(world.chunks[0].buffers[0].buckets))
    assert compared > 1000
    assert (max(buckets) > 2) == (bucket_elements is not None)


@pytest.mark.parametrize(("pp", "counts"), [(2, (4, 3)), (3, (2, 3, 2)), (4, (2, 2, 2, 1))])
def test_uneven_pipelines_hold_the_layers_that_make_the_slowest_stage_least(
    pp: int, counts: tuple[int, ...], device: Any
) -> None:
    """The output layer of a large vocabulary counts; World compares gbuf_ranges with the spec."""
    seen = [
        (world.at.pp, [layer.layer_number for layer in world.chunks[0].module.decoder.layers])
        for world in worlds(recipe_of(UNEVEN), Layout(1, pp, 2), device)
    ]
    ends = list(itertools.accumulate(counts, initial=0))
    numbers = [[*range(a + 1, b + 1)] for a, b in itertools.pairwise(ends)]
    assert seen == [(stage, numbers[stage]) for stage in range(pp) for _ in range(2)]


def test_optimizer_shards_tile_every_parameter_once_over_data_parallel_ranks(device: Any) -> None:
    from liver_hpc.world.optimizer import holdings

    recipe = recipe_of(MODELS["tied-swiglu-gqa"])
    layout = Layout(2, 2, 4)
    pieces: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    sizes: dict[tuple[int, int, str], int] = {}
    for world in worlds(recipe, layout, device):
        names = {parameter: name for name, parameter in world.chunks[0].module.named_parameters()}
        for parameter, held in holdings(world.optimizers).items():
            key = (world.at.tp, world.at.pp, names[parameter])
            pieces.setdefault(key, []).append(held.interval)
            sizes[key] = parameter.numel()
    for key, intervals in pieces.items():
        ends = [0, *itertools.chain.from_iterable(sorted(intervals)), sizes[key]]
        assert ends[::2] == ends[1::2], key


def test_the_derived_spec_with_experts_and_chunks_is_the_one_by_rule(device: Any) -> None:
    experts = {"number": 4, "ffn_hidden": 16, "shared_ffn_hidden": 24, "layer_freq": 2}
    router = {"score_function": "sigmoid", "bias_update_rate": 0.01}
    recipe = recipe_of({"heads": 4, "qk_norm": True, "experts": experts | router})
    by_rule = gpt_spec(recipe.options, (2,), vpps=(1, 2), eps=(2, 4))
    found = derived(recipe, "tp2 sp", "pp2", "pp2 vpp2", "dp2 ep2", "tp2 pp2 vpp2 dp4 ep4 sp")
    assert found.refused == {}
    assert found.tensors == by_rule.tensors
    assert found.stages == by_rule.stages
    assert found.homes == by_rule.homes


@pytest.mark.parametrize("model", [*MODELS.values(), UNEVEN])
def test_the_derived_spec_is_the_one_by_rule(model: dict[str, Any], device: Any) -> None:
    recipe = recipe_of(model)
    by_rule = recipe.spec
    found = derived(recipe, *(f"tp{tp} pp{pp}" for tp in (1, 2, 4) for pp in (1, 2, 3, 4)))
    assert found.tensors == by_rule.tensors
    assert found.stages == {key: by_rule.stages[key] for key in ("pp1", "pp2", "pp3", "pp4")}
    assert found.parameter_bytes == by_rule.parameter_bytes
    assert not found.refused


def test_layouts_that_do_not_divide_the_model_are_refused(device: Any) -> None:
    recipe = recipe_of(MODELS["tied-swiglu-gqa"])
    recipe.spec = derived(recipe, "tp8", "tp16", "pp5", "tp2 pp5", "pp2 vpp3")
    with pytest.raises(ConfigError, match=r"tp=8 does not divide model\.query_groups, 4"):
        recipe.check_layout(Layout(8, 1, 1))
    with pytest.raises(ConfigError, match=r"num_attention_heads \(8\)"):
        recipe.spec.check_layout(Layout(16, 1, 1))
    for tp in (1, 2):
        with pytest.raises(ConfigError, match="pp=5 is more than the model's 4 layers"):
            recipe.check_layout(Layout(tp, 5, 1))
    with pytest.raises(ConfigError, match="should be divisible by vp_size 3"):
        recipe.check_layout(Layout(1, 2, 1, vpp=3))


def test_building_a_world_draws_no_random_numbers(device: Any) -> None:
    """It is built beside a training thread, whose dropout draws from the same generator."""
    import torch

    recipe = recipe_of(MODELS["untied-gelu-bias-bf16"])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in worlds(recipe, Layout(1, 1, 1), device):
        assert torch.equal(torch.get_rng_state(), before)
