"""Worlds that are built without memory, and get it later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import EXP_AVG, PARAMETER
from tests.integration.predicting import PredictingGPT
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.test_expert_layouts import gpt
from tests.integration.test_experts import AUX, BIAS, model
from tests.integration.toys import Toy, build_world, derived

Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
"""A tensor's type, shape, stride, offset, and the bytes of its storage."""


def place(tensor: torch.Tensor) -> Place:
    at = (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return (*at, tensor.untyped_storage().nbytes())


def tensors(world: Any) -> dict[str, list[torch.Tensor]]:
    """All of a world, by kind, and its parameters and their gradients as Megatron has them."""
    from liver_hpc.world import hollow

    kinds = (GRADIENT, *world.recipe.spec.kinds)
    found = {kind: [*hollow._tensors(world, kind)] for kind in kinds}
    parameters = [each for chunk in world.chunks for each in chunk.parameters()]
    found["parameters"] = [each.data for each in parameters]
    found["gradients"] = [each.main_grad for each in parameters if each.requires_grad]
    return found


@pytest.mark.parametrize(
    ("options", "recipe_class", "layout"),
    [
        (model("bf16", **AUX, **BIAS), RandomTokenGPT, "tp2 dp2 ep2 sp"),
        (model("bf16", shared_ffn_hidden=24), RandomTokenGPT, "pp2 vpp2 dp2"),
        (model(), PredictingGPT, "tp2 dp2 sp"),
    ],
    ids=["experts", "chunks", "fp32"],
)
def test_they_become_what_worlds_are_and_train_alike(
    options: dict[str, Any], recipe_class: type[RandomTokenGPT], layout: str, device: Any
) -> None:
    from liver_hpc.world import hollow
    from liver_hpc.world.memoryless import Memoryless, has_none

    recipe = gpt(options | {"layers": 4}, recipe_class)
    recipe.spec = derived(recipe, layout)
    ordinary = build_world(recipe, device, layout, 1)
    world = build_world(recipe, device, layout, 1, allocating=Memoryless)
    buffers = [each for chunk in world.chunks for each in chunk.module.buffers()]
    assert all(has_none(each) for kind in tensors(world).values() for each in kind)
    assert not any(map(has_none, buffers))

    world.accumulate_in_training_lane()
    hollow.allocate(world, (GRADIENT, *recipe.spec.kinds))
    assert world.gradients_are_clear
    for kind, wanted in tensors(ordinary).items():
        assert [*map(place, tensors(world)[kind])] == [*map(place, wanted)], kind
    for one, other in zip(
        buffers, [each for chunk in ordinary.chunks for each in chunk.module.buffers()], strict=True
    ):
        assert torch.equal(one, other)
    for each in (world, ordinary):
        held = tensors(each)
        for kind in recipe.spec.kinds:
            for tensor in held[kind]:  # padding, too, which stand-ins gather into parameters
                tensor.detach().fill_(0.5)
        each.warm_up()
    trained = tensors(ordinary)
    for kind in trained.keys() - {PARAMETER, GRADIENT}:  # whose buffers have padding
        for one, other in zip(tensors(world)[kind], trained[kind], strict=True):
            assert torch.equal(one, other), kind
    assert all(each.any() for each in trained[EXP_AVG])
    for each in (world, ordinary):
        each.close()


def test_what_is_made_like_a_parameter_has_memory(device: Any) -> None:
    """As a buffer with an average of what is trained, which is moved as parameters are."""
    from liver_hpc.world import hollow
    from liver_hpc.world.memoryless import Memoryless

    def parts(_context: Any) -> dict[str, Any]:
        part = torch.nn.Linear(8, 8, bias=False)
        part.register_buffer("average", torch.zeros_like(part.weight))
        part.register_buffer("most", part.weight.new_full((3,), 2.0))
        return {"part": part}

    toy = Toy(parts)
    toy.spec = derived(toy, "dp1")
    world = build_world(toy, device, allocating=Memoryless)
    hollow.allocate(world, (GRADIENT, *toy.spec.kinds))
    held = [world.state.view(PARAMETER, *at) for at in world.state.boxes(PARAMETER, "buffer")]
    assert [each.flatten().tolist() for each in held] == [[0.0] * 64, [2.0] * 3]
    world.close()
