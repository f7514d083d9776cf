"""A spec that is not of the run's model is refused before a byte moves, by the name of what is
wrong: as a recipe takes it, or as a world is built from it."""

# ruff: noqa: E501 - one mutation a line

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import Chunks, ModelSpec
from liver_hpc.recipes.base import BuildContext, Recipe
from tests.integration.random_tokens import tiny_recipe
from tests.integration.toys import Toy, build_world, derived, experts

Wrong = Callable[[ModelSpec], dict[str, Any]]


# ---- models


def gpt(**train: Any) -> Recipe:
    recipe = tiny_recipe()
    config = recipe.config
    recipe.config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    recipe.spec = derived(recipe, "tp2", "pp2")
    return recipe


def overlapping() -> Recipe:
    return gpt(overlap_grad_reduce=True, bucket_elements=10_000)


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8, bias=False)


def counting() -> Toy:
    def parts(_: BuildContext) -> dict[str, Any]:
        body, base = linear(), linear().requires_grad_(False)
        body.register_buffer("calls", torch.tensor(0))
        return {"body": body, "base": base}

    toy = Toy(parts)
    toy.spec = derived(toy, "dp1")
    return toy


def interleaved() -> Toy:
    """Four layers: stage r of two holds layers r and r + 2."""

    def parts(context: BuildContext) -> dict[str, Any]:
        pp, vpp = context.layout.pp, context.layout.vpp
        size = 4 // (pp * vpp)
        first = (context.at.pp + context.chunk * pp) * size
        made = {str(number): linear() for number in range(first, first + size)}
        return {"layers": torch.nn.ModuleDict(made)}

    toy = Toy(parts)
    toy.spec = derived(toy, "pp2 vpp2")
    return toy


# ---- what is wrong with their specs


def changed(name: str, **values: Any) -> Wrong:
    """The tensor of this name has other values."""

    def wrong(spec: ModelSpec) -> dict[str, Any]:
        assert any(tensor.name == name for tensor in spec.tensors)
        return {
            "tensors": tuple(
                replace(tensor, **values) if tensor.name == name else tensor
                for tensor in spec.tensors
            )
        }

    return wrong


def table(key: str, change: Callable[[tuple[Chunks, ...]], tuple[Chunks, ...]]) -> Wrong:
    return lambda spec: {"stages": {**spec.stages, key: change(spec.stages[key])}}


def first_and_last_swapped(stages: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    (((first, *rest, last),),) = stages
    return (((last, *rest, first),),)


def one_tensor_less(stages: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    ((indices,),) = stages
    return ((indices[:-1],),)


def one_layer_further(stages: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    (((*first, moved),), ((*last,),)) = stages
    return ((tuple(first),), ((moved, *last),))


def chunks_swapped(stages: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    return tuple(chunks[::-1] for chunks in stages)


def without_buffers(spec: ModelSpec) -> dict[str, Any]:
    kept = tuple(tensor for tensor in spec.tensors if tensor.role != "buffer")
    return {"tensors": kept, "stages": {"pp1": ((tuple(range(len(kept))),),)}}


def homes(change: Callable[[int | None], int | None]) -> Wrong:
    return lambda spec: {"homes": {2: tuple(map(change, spec.homes[2]))}}


QKV, FC1 = (
    f"decoder.layers.0.{name}.weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
)
EMBEDDING = "embedding.word_embeddings.weight"

MUTATIONS: dict[str, tuple[Callable[[], Recipe], str, Wrong, str]] = {
    "layers swapped": (gpt, "tp2", table("pp1", first_and_last_swapped), r"yields embedding\.word.* where .* has decoder\.final"),
    "tp_dim": (gpt, "tp2", changed(QKV, tp_dim=1, tp_blocks=(64,)), r"layers\.0.*linear_qkv\.weight holds .*: not the share of tp rank 0"),
    "not split": (gpt, "tp2", changed(QKV, tp_dim=None, tp_blocks=()), r"layers\.0.*linear_qkv\.weight holds .*: not the share"),
    "blocks": (gpt, "tp2", changed(FC1, tp_blocks=(192,)), r"layers\.0.*linear_fc1\.weight holds .*: not the share"),
    "shape": (gpt, "tp2", changed(EMBEDDING, shape=(128, 66)), r"embedding.*weight.* is \[64, 64\], .* wants \[64, 66\]"),
    "bytes of parameters": (gpt, "tp2", lambda _: {"parameter_bytes": 2}, r"embedding\.word.* has elements of 4 bytes, in the run's spec of 2"),
    "a tensor less": (gpt, "tp2", table("pp1", one_tensor_less), r"decoder\.final_layernorm\.weight: no stage of pp1 holds it"),
    "another stage": (gpt, "pp2", table("pp2", one_layer_further), r"run's spec lacks decoder\.layers\.1\.mlp\.linear_fc2\.weight"),
    "tied mark": (gpt, "pp2", changed(EMBEDDING, tied=False), r"embedding\.word.*: stages \[0, 1\] of pp2 hold it, but it is not tied"),
    "bucket_elements": (overlapping, "dp2", lambda _: {"bucket_elements": 1 << 20}, r"optimizer state of 'embedding.*' covers \(0, 4096\), .* wants \(0, 0\)"),
    "a buffer missing": (counting, "dp1", without_buffers, r"the run's spec lacks body\.calls"),
    "a buffer as parameter": (counting, "dp1", changed("body.calls", role="trained"), r"body\.calls is buffer, in the run's spec trained"),
    "frozen as trained": (counting, "dp2", changed("base.weight", role="trained"), r"base\.weight is frozen, in the run's spec trained"),
    "bytes of a buffer": (counting, "dp1", changed("body.calls", element_bytes=4), r"body\.calls has elements of 8 bytes, in the run's spec of 4"),
    "no homes": (experts, "ep2 dp2", lambda _: {"homes": {}}, r"ep=2: the model's spec has ep \[\] only"),
    "experts as dense": (experts, "ep2 dp2", homes(lambda _: None), r"the model lacks experts\.2\.weight, experts\.3\.weight"),
    "another's expert": (experts, "ep2 dp2", homes(lambda home: None if home is None else 1 - home), r"yields experts\.0\.weight where .* has experts\.2\.weight"),
    "no such home": (experts, "ep2 dp2", homes(lambda home: 2 if home else home), r"experts\.2\.weight: its home is rank 2 of ep2"),
    "expert mark": (experts, "ep2 dp2", changed("experts.3.weight", expert=False), r"experts\.3\.weight: rank 1 of ep2 holds it alone, but it is no expert's"),
    "chunks swapped": (interleaved, "pp2 vpp2", table("pp2 vpp2", chunks_swapped), r"yields layers\.0\.weight where .* has layers\.2\.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "wrong", "named"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_spec_that_is_not_of_the_model_is_refused_by_name(
    model: Callable[[], Recipe], layout: str, wrong: Wrong, named: str, device: Any
) -> None:
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World

    recipe, sizes = model(), Layout.parse(layout)
    build_world(recipe, device, layout).close()
    right = recipe.spec
    mutated = replace(right, **wrong(right))
    install_sentinel(0)

    def begin() -> None:
        recipe.spec = mutated
        World(recipe, RankMap(sizes, tuple(range(sizes.workers))), 0, 10_000, device)

    with pytest.raises((PlanError, ConfigError), match=named):
        begin()
    assert mutated.digest != right.digest
