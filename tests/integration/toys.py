"""Small models of a user's own, on one seat of a layout, whose groups are stand-ins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import BuildContext, NoOptions, Recipe
from tests.integration.random_tokens import tiny_config

_generations = itertools.count()


class Toy(Recipe):
    """A recipe of the parts that a test gives: `parts(context)` -> name -> part.

    further: options of its TransformerConfig.
    """

    def __init__(self, parts: Callable[[BuildContext], dict[str, Any]], **further: Any) -> None:
        super().__init__(NoOptions(), tiny_config())
        self.parts = parts
        self.further = further

    def build(self, context: BuildContext) -> Any:
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        layout = context.layout
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=layout.tp,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            **self.further,
        )
        model = MegatronModule(config)
        for name, part in self.parts(context).items():
            setattr(model, name, part)
        return model

    def hidden_shape(self) -> tuple[int, ...]:
        return (8, 1, 8)

    def batch(self, step: int) -> Sequence[Any]:
        raise NotImplementedError

    def loss(self, model: Any, samples: Sequence[Any]) -> Any:
        raise NotImplementedError


def derived(recipe: Recipe, *layouts: str) -> ModelSpec:
    """The spec of what a recipe builds, for some layouts; the process must have its device."""
    from liver_hpc.world.derive import Derivation
    from liver_hpc.world.groups import install_sentinel

    install_sentinel(0)
    return Derivation(recipe).spec(map(Layout.parse, layouts))


def build_world(
    recipe: Recipe, device: Any, layout: str = "dp1", worker: int = 0, **options: Any
) -> Any:
    """The world of one worker, whose id is its rank; by the recipe's spec, or the derived one.
    options: more of `World`'s."""
    from liver_hpc.errors import ConfigError
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World

    sizes = Layout.parse(layout)
    try:
        recipe.spec.check_layout(sizes)
    except ConfigError:
        recipe.spec = derived(recipe, layout)
    install_sentinel(worker)
    rank_map = RankMap(sizes, tuple(range(sizes.workers)))
    # A generation of its own: a test that fails may leave a world open.
    return World(recipe, rank_map, worker, next(_generations), device, **options)


def experts() -> Toy:
    """Four of them, with global numbers, in an optimizer of their own where ep is more than 1."""
    import torch

    def parts(context: BuildContext) -> dict[str, Any]:
        size = 4 // context.layout.ep
        first = context.layout.ep_rank(context.at) * size
        made = {str(n): torch.nn.Linear(8, 8, bias=False) for n in range(first, first + size)}
        for expert in made.values():
            marked: Any = expert.weight
            marked.allreduce = context.layout.ep == 1
        router = torch.nn.Linear(8, 8, bias=False)
        return {"router": router, "experts": torch.nn.ModuleDict(made)}

    toy = Toy(parts)
    toy.spec = derived(toy, "ep2 dp2")
    return toy
