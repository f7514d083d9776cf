"""First values are those of the model's own initialization: in distribution, and the same in every
layout; what cannot be drawn again is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import ModelSpec, TensorSpec
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.recipes.first_values import replayed
from liver_hpc.recipes.gpt import GPT
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.integration.random_tokens import RandomTokenGPT, tiny_config
from tests.integration.toys import Toy, build_world, derived

SEED = 11
MOE = {"experts": {"number": 4, "topk": 2, "shared_ffn_hidden": 48}, "bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "untied, biases, learned positions": {"position": "learned", "bias": True},
    "tied, swiglu, grouped queries": {"tied_embeddings": True, "activation": "swiglu"},
    "bf16": {"dtype": "bf16"},
    "experts": MOE,
}


class Initialized(RandomTokenGPT):
    """The GPT as a script of a user's builds it: Megatron fills its parameters."""

    initial = Recipe.initial
    draws = False

    def build(self, context: BuildContext) -> Any:
        self.draws = context.draws
        return super().build(context)

    def _transformer_config(self, layout: Layout) -> Any:
        config = super()._transformer_config(layout)
        config.perform_initialization = self.draws
        return config


class OnGPUs(Initialized):
    """Megatron fills each rank's own part there, within its tracker of random states."""

    def _transformer_config(self, layout: Layout) -> Any:
        config = super()._transformer_config(layout)
        config.use_cpu_initialization = False
        return config


def recipe_of(recipe_class: type[RandomTokenGPT] = Initialized, **model: Any) -> RandomTokenGPT:
    config = tiny_config(**{"vocab_size": 512, **model})
    return recipe_class(GPTConfig.model_validate(config.model), config)


def initialized_by_itself(recipe: Recipe, device: Any) -> dict[str, torch.Tensor]:
    """The parameters as the model fills them itself, with nothing split."""
    from liver_hpc.world import megatron, thread
    from liver_hpc.world.groups import GroupBook, install_sentinel

    install_sentinel(0)
    layout, at = Layout(1, 1, 1), Coordinate(0, 0, 0)
    book = GroupBook(-1000, 0, device)
    groups = megatron.group_collection(RankMap(layout, (0,)), at, book)
    torch.manual_seed(SEED + 1)
    with thread.rehearsal(), thread.groups_in_use(groups):
        module = recipe.build(BuildContext(layout, at, groups, draws=True))
    book.close()
    return {name: p.detach().float() for name, p in module.named_parameters()}


def drawn(recipe: Recipe, tensor: TensorSpec) -> torch.Tensor:
    return recipe.initial(tensor, torch.Generator().manual_seed(SEED))


def assert_like(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Two samples of one distribution, or the same constant. Bounds: six standard errors, and the
    rounding of bf16."""
    assert found.shape == wanted.shape, name
    n, spread = wanted.numel(), float(wanted.std())
    if spread == 0 or float(found.std()) == 0:
        assert torch.equal(found, wanted), name
        return
    assert abs(float(found.mean() - wanted.mean())) < 6 * spread * math.sqrt(2 / n), name
    assert abs(float(found.std()) / spread - 1) < 6 / math.sqrt(n) + 0.004, name
    assert not torch.equal(found, wanted), name


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_gpt_begins_as_megatron_fills_it(model: dict[str, Any], device: Any) -> None:
    recipe = recipe_of(**model)
    recipe.spec = derived(recipe, "dp1")
    wanted = initialized_by_itself(recipe, device)
    assert {tensor.name for tensor in recipe.spec.tensors if tensor.role != "buffer"} == {*wanted}
    for tensor in recipe.spec.tensors:
        if tensor.role != "buffer":
            found = drawn(recipe, tensor)
            assert found.dtype == torch.float32
            assert_like(found, wanted[tensor.name], tensor.name)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_gpt_recipes_own_values_are_the_same_bit_for_bit(
    model: dict[str, Any], device: Any
) -> None:
    recipe = recipe_of(**model)
    for tensor in derived(recipe, "dp1").tensors:
        if tensor.role != "buffer":
            generator = torch.Generator().manual_seed(SEED)
            assert torch.equal(drawn(recipe, tensor), GPT.initial(recipe, tensor, generator))


def test_megatrons_way_on_gpus_gives_the_same(device: Any) -> None:
    here, there = (derived(recipe_of(kind, **MOE), "dp1") for kind in (Initialized, OnGPUs))
    for one, other in zip(here.tensors, there.tensors, strict=True):
        assert one.first == other.first, one.name


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2 pp2"])
def test_a_gpt_begins_the_same_in_every_layout(layout: str, device: Any) -> None:
    recipe = recipe_of(tied_embeddings=True, activation="swiglu")
    recipe.spec = derived(recipe, layout)
    whole: dict[str, torch.Tensor] = {}
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, SEED)
    for index, box in world.state.boxes("parameter"):
        whole[recipe.spec.tensors[index].name] = world.state.view("parameter", index, box).clone()
    world.close()
    for worker in range(Layout.parse(layout).workers):
        world = build_world(recipe, device, layout, worker)
        world.state.initialize(recipe.initial, SEED)
        for index, box in world.state.boxes("parameter"):
            part = whole[recipe.spec.tensors[index].name][box.row0 : box.row1, box.col0 : box.col1]
            assert torch.equal(world.state.view("parameter", index, box), part)
        world.close()


def test_a_spec_keeps_first_values_as_text(device: Any) -> None:
    from liver_hpc.recipes.specs import Answer

    spec = derived(recipe_of(), "dp1")
    text = Answer[ModelSpec](value=spec).model_dump_json()
    kept = Answer[ModelSpec].model_validate_json(text).value
    assert kept is not None
    assert [tensor.first for tensor in kept.tensors] == [tensor.first for tensor in spec.tensors]
    assert kept.digest == spec.digest


# ---- a user's own modules


def filled(fill: Callable[[torch.Tensor], Any], *shape: int) -> torch.nn.Module:
    """A module whose one parameter a test fills."""
    part = torch.nn.Module()
    part.weight = torch.nn.Parameter(torch.empty(shape or (64, 48)))
    with torch.no_grad():
        fill(part.weight)
    return part


def assigned(value: Callable[[], torch.Tensor]) -> torch.nn.Module:
    part = torch.nn.Module()
    part.weight = torch.nn.Parameter(value())
    return part


def replaced(weight: torch.Tensor) -> None:
    weight.data = torch.randn(weight.shape) * 0.3 + 1


def scaled(weight: torch.Tensor) -> None:
    torch.nn.init.xavier_normal_(weight)
    weight.mul_(0.5).div_(torch.tensor(2.0)).add_(1.0, alpha=2)


def copied_in_parts(weight: torch.Tensor) -> None:
    master = torch.empty(weight.shape).uniform_(-1, 1).to(torch.bfloat16)
    weight.data.copy_(torch.cat(torch.split(master, 16)[0::1]))


def set_twice(weight: torch.Tensor) -> None:
    torch.nn.init.orthogonal_(weight)
    weight[:] = 3.0


OWN: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(48, 64),
    "convolution": lambda: torch.nn.Conv2d(4, 16, 3),
    "embedding": lambda: torch.nn.Embedding(64, 48),
    "norms": lambda: torch.nn.Sequential(torch.nn.LayerNorm(48), torch.nn.RMSNorm(48)),
    "bf16, cast": lambda: torch.nn.Linear(48, 64).to(torch.bfloat16).float(),
    "truncated": lambda: filled(lambda w: torch.nn.init.trunc_normal_(w, 0.5, 2.0, -1.0, 3.0)),
    "kaiming": lambda: filled(torch.nn.init.kaiming_normal_),
    "assigned": lambda: assigned(lambda: 0.02 * torch.randn(64, 48)),
    "one number": lambda: assigned(lambda: torch.tensor([[0.07, 0.07]])),
    "exponential": lambda: filled(lambda w: w.exponential_(0.5).log1p_().neg_()),
    "drawn in between": lambda: assigned(lambda: torch.normal(1.0, 0.1, (64, 48)).clamp(0.9, 1.1)),
    "from one": lambda: assigned(lambda: 1 - torch.rand(64, 48)),
    "less a part": lambda: assigned(lambda: torch.rsub(torch.rand(64, 48), 1.0)),
    "data replaced": lambda: filled(replaced),
    "scaled": lambda: filled(scaled),
    "in parts": lambda: filled(copied_in_parts),
    "set twice": lambda: filled(set_twice),
}


@pytest.mark.parametrize("part", OWN.values(), ids=OWN)
def test_modules_of_a_user_begin_as_they_fill_themselves(
    part: Callable[[], torch.nn.Module], device: Any
) -> None:
    recipe = Toy(lambda _: {"body": part()})
    wanted = initialized_by_itself(recipe, device)
    spec = derived(recipe, "dp1")
    assert [tensor.name for tensor in spec.tensors] == [*wanted]
    for tensor in spec.tensors:
        assert_like(drawn(recipe, tensor), wanted[tensor.name], tensor.name)


def padded() -> torch.nn.Module:
    return torch.nn.Embedding(64, 48, padding_idx=0)


def twins() -> torch.nn.Module:
    first = torch.nn.Linear(8, 8, bias=False)
    second = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        second.weight.copy_(first.weight)
    return torch.nn.Sequential(first, second)


def repeated(weight: torch.Tensor) -> None:
    weight.copy_(torch.randn(48))


def overlapping(weight: torch.Tensor) -> None:
    drawn_once = torch.randn(weight.shape)
    weight.copy_(torch.cat([drawn_once[:32], drawn_once[:32]]))


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "orthogonal": (lambda: filled(torch.nn.init.orthogonal_), r"torch\.nn\.init\.orthogonal_"),
    "sparse": (lambda: filled(lambda w: torch.nn.init.sparse_(w, 0.1)), r"torch\.nn\.init\.sparse"),
    "eye": (lambda: filled(torch.nn.init.eye_), "computed otherwise"),
    "dirac": (lambda: filled(torch.nn.init.dirac_, 4, 4, 3), r"torch\.nn\.init\.dirac_"),
    "nothing": (lambda: filled(lambda _: None), "nothing fills it"),
    "places": (lambda: assigned(lambda: torch.arange(8.0)), r"computed otherwise \(arange\)"),
    "numbers": (lambda: assigned(lambda: torch.tensor([1.0, 2.0])), "computed otherwise"),
    "padding": (padded, "a part of it is filled otherwise"),
    "twins": (twins, r"it begins with values of body\.0\.weight\)"),
    "repeated": (lambda: filled(repeated), "a draw is repeated"),
    "overlapping": (lambda: filled(overlapping), r"computed otherwise \(cat\)"),
    "whole": (
        lambda: assigned(lambda: torch.randn(8).to(torch.int64).to(torch.float32)),
        "computed otherwise",
    ),
    "no number": (lambda: filled(lambda w: w.fill_(-math.inf)), r"computed otherwise \(fill\)"),
    "floor": (
        lambda: assigned(lambda: torch.rand(8).div(0.25, rounding_mode="floor")),
        r"computed otherwise \(div\)",
    ),
    "product": (
        lambda: assigned(lambda: torch.rand(8) * torch.rand(8)),
        r"computed otherwise \(mul\)",
    ),
}


@pytest.mark.parametrize(("part", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_again_is_refused_by_name(
    part: Callable[[], torch.nn.Module], why: str, device: Any
) -> None:
    recipe = Toy(lambda _: {"body": part()})
    with pytest.raises(PlanError, match=rf"`initial` .*: body\.[^ ]* \(.*{why}"):
        derived(recipe, "dp1")


class Own(Toy):
    def initial(self, tensor: TensorSpec, generator: torch.Generator) -> torch.Tensor:
        if tensor.name == "body.weight":
            return torch.eye(*tensor.shape)
        return super().initial(tensor, generator)


def test_a_recipe_that_gives_first_values_is_not_refused(device: Any) -> None:
    recipe = Own(lambda _: {"body": filled(lambda _: None), "head": torch.nn.Linear(48, 8)})
    recipe.spec = derived(recipe, "dp1")
    body, head, _ = recipe.spec.tensors
    assert torch.equal(drawn(recipe, body), torch.eye(64, 48))
    assert drawn(recipe, head).abs().max() <= 1 / math.sqrt(48)
    with pytest.raises(ConfigError, match=r"values of body\.weight are not known: nothing fills"):
        replayed(body, torch.Generator())


def test_a_model_is_not_filled_beside_a_run(device: Any) -> None:
    """Recording draws nothing from this process's streams."""
    before = torch.get_rng_state()
    derived(recipe_of(), "dp1")
    assert torch.equal(torch.get_rng_state(), before)
