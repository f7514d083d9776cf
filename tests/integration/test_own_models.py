"""Models of a user's own that cannot be moved right are refused by name as a world is built; those
that can be are marked and built without a trace in the training thread beside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import BuildContext
from liver_hpc.recipes.gpt_config import GPTConfig
from tests.integration.random_tokens import RandomTokenGPT, tiny_config, tiny_recipe
from tests.integration.toys import Toy, build_world, derived


class Router(torch.nn.Linear):
    """As of a mixture of experts: a bias that no gradient moves."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(8, 8, bias=False)
        self.register_buffer("expert_bias", torch.zeros(8), persistent=persistent)


class Scaled(torch.nn.Linear):
    """As a layer of Transformer Engine in FP8: scales that only `state_dict` shows."""

    def __init__(self, extra: Any) -> None:
        super().__init__(8, 8, bias=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def frozen() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8, bias=False).requires_grad_(False)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (lambda: Router(persistent=True), "body.expert_bias"),
        (lambda: Scaled(torch.ones(3)), "body._extra_state"),
        (lambda: Scaled({"scale": 2.0}), "body._extra_state"),
    ],
)
def test_state_that_is_not_moved_is_refused_by_name(
    part: Callable[[], Any], named: str, device: Any
) -> None:
    with pytest.raises(PlanError, match=rf"{named} .*not moved.*persistent=False"):
        build_world(Toy(lambda _: {"body": part()}), device)


def test_statistics_of_batches_are_refused_each_by_name(device: Any) -> None:
    with pytest.raises(PlanError) as refused:
        build_world(Toy(lambda _: {"norm": torch.nn.BatchNorm1d(8)}), device)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert name in str(refused.value)


@pytest.mark.parametrize(
    "part",
    [lambda: Router(persistent=False), lambda: Scaled(None), lambda: Scaled(torch.empty(0))],
)
def test_what_is_recomputed_or_empty_is_no_state(part: Callable[[], Any], device: Any) -> None:
    build_world(Toy(lambda _: {"body": part()}), device).close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_frozen_parameter_is_refused_by_name(worker: int, device: Any) -> None:
    """On every seat, also on one whose share of the optimizer would not show it."""
    recipe = Toy(lambda _: {"body": frozen(), "head": torch.nn.Linear(8, 8, bias=False)})
    with pytest.raises(PlanError, match=r"body\.weight is frozen"):
        build_world(recipe, device, "dp2", worker)


def test_a_parameter_of_another_precision_is_refused_by_name(device: Any) -> None:
    head = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    recipe = Toy(lambda _: {"body": torch.nn.Linear(8, 8, bias=False), "head": head})
    with pytest.raises(PlanError, match=r"head\.weight is torch\.bfloat16, .* torch\.float32"):
        build_world(recipe, device)


def test_a_tensor_of_more_dimensions_is_held_as_it_is(device: Any) -> None:
    recipe = Toy(lambda _: {"conv": torch.nn.Conv2d(2, 4, 3, bias=False)})
    world = build_world(recipe, device)
    assert recipe.spec.tensors[0].shape == (4, 2, 3, 3)
    held = world.state.view("parameter", 0, recipe.spec.tensors[0].whole)
    assert torch.equal(held, world.chunks[0].module.conv.weight.detach().view(4, 18))
    world.close()


# ---- what the worker's module is, against the spec that was derived before


def layers(order: list[int]) -> Toy:
    """Four layers alike, two a stage at pp=2, with global numbers, yielded in their `order`."""

    def parts(context: BuildContext) -> dict[str, Any]:
        size = 4 // context.layout.pp
        here = range(context.at.pp * size, (context.at.pp + 1) * size)
        made = {str(n): torch.nn.Linear(8, 8, bias=False) for n in order if n in here}
        return {"layers": torch.nn.ModuleDict(made)}

    return Toy(parts)


@pytest.mark.parametrize(("layout", "worker"), [("dp1", 0), ("pp2", 0), ("pp2", 1)])
def test_layers_of_the_same_shape_in_another_order_are_refused(
    layout: str, worker: int, device: Any
) -> None:
    first, then = layers([0, 1, 2, 3]), layers([1, 0, 3, 2])
    then.spec = first.spec = derived(first, layout)
    build_world(first, device, layout, worker).close()
    with pytest.raises(PlanError, match=r"yields layers\.\d\.weight where .* layers\.\d\.weight"):
        build_world(then, device, layout, worker)


def test_layers_that_are_numbered_anew_on_each_stage_are_refused(device: Any) -> None:
    """Nothing says which of the model's layers they are."""

    def parts(context: BuildContext) -> dict[str, Any]:
        made = [torch.nn.Linear(8, 8, bias=False) for _ in range(4 // context.layout.pp)]
        return {"layers": torch.nn.ModuleList(made)}

    with pytest.raises(ConfigError, match=r"pp=2 no stage holds layers\.2\.weight, layers\.3"):
        derived(Toy(parts), "pp2").check_layout(Layout(1, 2, 1))


def test_a_split_that_the_module_does_not_declare_is_refused(device: Any) -> None:
    def parts(context: BuildContext) -> dict[str, Any]:
        return {"body": torch.nn.Linear(8, 8 // context.layout.tp, bias=False)}

    spec = derived(Toy(parts), "tp2")
    with pytest.raises(ConfigError, match=r"body\.weight.* does not say how it is split"):
        spec.check_layout(Layout(2, 1, 1))


def wrong_dim(spec: ModelSpec) -> dict[str, Any]:
    tensors = tuple(replace(t, tp_dim=1) if t.tp_dim == 0 else t for t in spec.tensors)
    return {"tensors": tensors}


def wrong_blocks(spec: ModelSpec) -> dict[str, Any]:
    return {"tensors": tuple(replace(t, tp_blocks=(32, 32)) if t.tp_blocks == (64,) else t
            for t in spec.tensors)}  # fmt: skip


def swapped(spec: ModelSpec) -> dict[str, Any]:
    ((first, *rest, last),) = spec.stages["pp1"][0]
    return {"stages": {**spec.stages, "pp1": (((last, *rest, first),),)}}


def a_tensor_less(spec: ModelSpec) -> dict[str, Any]:
    return {"stages": {**spec.stages, "pp1": ((spec.stages["pp1"][0][0][:-1],),)}}


def other_bytes(spec: ModelSpec) -> dict[str, Any]:
    return {"parameter_bytes": 2}


def another_shape(spec: ModelSpec) -> dict[str, Any]:
    first, *rest = spec.tensors
    return {"tensors": (replace(first, shape=(first.shape[0], 65)), *rest)}


@pytest.mark.parametrize(
    "wrong", [wrong_dim, wrong_blocks, swapped, a_tensor_less, other_bytes, another_shape]
)
def test_a_spec_that_is_not_of_this_model_is_refused_as_a_world_is_built(
    wrong: Callable[[ModelSpec], dict[str, Any]], device: Any
) -> None:
    recipe = tiny_recipe()
    build_world(recipe, device, "tp2").close()
    recipe.spec = replace(recipe.spec, **wrong(recipe.spec))
    with pytest.raises(PlanError):
        build_world(recipe, device, "tp2")


# ---- marks


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_shards_are_marked_whatever_class_their_layer_has(layout: str, device: Any) -> None:
    """The gradient norm counts a shard that is not marked as a replica."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Own(ColumnParallelLinear):  # type: ignore[misc]
        pass

    def parts(context: BuildContext) -> dict[str, Any]:
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
            perform_initialization=False,
        )  # fmt: skip
        own = Own(8, 8, config=config, init_method=None, bias=True, tp_group=context.groups.tp)
        return {"own": own, "norm": torch.nn.RMSNorm(8)}

    recipe = Toy(parts)
    recipe.spec = derived(recipe, "tp1", "tp2")
    world = build_world(recipe, device, layout)
    marks = {
        name: (getattr(parameter, "tensor_model_parallel", False), parameter.partition_dim)
        for name, parameter in world.chunks[0].module.named_parameters()
        if hasattr(parameter, "partition_dim")
    }
    world.close()
    marks.pop("norm.weight", None)
    assert marks == {"own.weight": (True, 0), "own.bias": (True, 0)}


# ---- beside training


class InitializingGPT(RandomTokenGPT):
    """Megatron fills its weights as it builds: on a GPU within its tracker of random states."""

    def _transformer_config(self, layout: Layout) -> Any:
        config = super()._transformer_config(layout)
        config.perform_initialization, config.use_cpu_initialization = True, False
        return config


def streams() -> dict[str, torch.Tensor]:
    """Where every stream of random numbers in this process stands."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    return {"device": torch.get_rng_state()} | {k: v.clone() for k, v in tracked.items()}


def train(device: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a model with dropout, and where the streams stand after them."""
    from liver_hpc.world.megatron import seed_dropout

    seed_dropout(11, tp_rank=0)
    recipe = tiny_recipe(dropout=0.2)
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, seed=3)
    losses = [world.train_step(step)[0].loss_sum for step in range(steps)]
    world.close()
    return losses, streams()


def test_a_model_that_fills_its_weights_is_built_beside_training_without_a_trace(
    device: Any,
) -> None:
    """Training's losses and streams of random numbers are those of a quiet run, bit for bit."""
    steps = 4
    quiet, quiet_streams = train(device, steps)
    config = tiny_config()
    recipe = InitializingGPT(GPTConfig.model_validate(config.model), config)
    stop, built, failures = threading.Event(), [], []

    def build() -> None:
        try:
            while not stop.is_set():
                build_world(recipe, device, "tp2").close()
                built.append(1)
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(f"{type(error).__name__}: {error}")

    builder = threading.Thread(target=build)
    builder.start()
    try:
        beside, beside_streams = train(device, steps)
    finally:
        stop.set()
        builder.join(60)
    assert failures == []
    assert len(built) > 1
    assert beside == quiet
    assert beside_streams.keys() == quiet_streams.keys()
    for name, stream in quiet_streams.items():
        assert torch.equal(beside_streams[name], stream), name
