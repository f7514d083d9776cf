"""Models of a user's own that cannot be moved right are refused by name as a world is built; those
that can be are marked and built without a trace in the training thread beside."""

from __future__ import annotations

import gc
import importlib
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.votes import Side, disagreements
from liver_hpc.recipes.base import BuildContext
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.megatron_lm.losses import mean_of
from liver_hpc.world import refused, thread
from tests.integration.random_tokens import RandomTokenGPT, tiny_config, tiny_recipe
from tests.integration.test_recomputation import TorchCheckpoints
from tests.integration.toys import Toy, build_world, derived, experts

MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "add_bias_linear": False}


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


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8, bias=False)


@pytest.mark.parametrize("extra", [torch.ones(3), {"scale": 2.0}])
def test_extra_state_is_refused_by_name_as_the_spec_is_derived(extra: Any, device: Any) -> None:
    with pytest.raises(PlanError, match=r"body\._extra_state is not moved"):
        derived(Toy(lambda _: {"body": Scaled(extra)}), "dp1")


def test_a_model_that_asks_for_its_rank_is_known_as_a_checkpoint_holds_it(device: Any) -> None:
    """After seats of other ranks were derived: Megatron asks so for the layers of a stage."""
    from liver_hpc.world.derive import Derivation
    from liver_hpc.world.groups import install_sentinel

    def parts(context: BuildContext) -> dict[str, Any]:
        assert torch.distributed.get_rank(group=context.groups.pp) == context.at.pp
        return {"body": linear()}

    install_sentinel(0)
    toy = Toy(parts)
    derivation = Derivation(toy)
    toy.spec = derivation.spec([Layout.parse("tp2 pp2")])
    assert {*derivation.stored({}).tensors} == {tensor.name for tensor in toy.spec.tensors}


def test_the_whole_model_is_built_once_for_a_worker_that_boots_as_another_one(device: Any) -> None:
    """It takes as long as there are experts, and a handoff would wait for the second one."""
    from liver_hpc.world.derive import derivation_of
    from liver_hpc.world.groups import install_sentinel

    seats = []

    def parts(context: BuildContext) -> dict[str, Any]:
        seats.append(torch.distributed.get_rank())
        return {"body": linear()}

    toy = Toy(parts)
    install_sentinel(0)
    frame = derivation_of(toy, 0).frame
    install_sentinel(5)
    assert derivation_of(toy, 5).frame is frame
    assert seats == [0]
    assert {*derivation_of(toy, 5).stored({}).tensors} == {*frame.tensors}
    assert seats == [0, 5]


@pytest.mark.parametrize("part", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_statistics_of_batches_are_refused_by_name_as_the_spec_is_derived(
    part: Callable[..., Any], device: Any
) -> None:
    toy = Toy(lambda _: {"norm": part(8, track_running_stats=True)})
    with pytest.raises(PlanError, match=rf"norm \({part.__name__}\) keeps running statistics"):
        derived(toy, "dp1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fp16": True}, r"fp16: its loss scale .* bf16"),
        ({"fp8": "e4m3"}, r"fp8: its scales"),
        ({"cuda_graph_impl": "local"}, r"cuda_graph_impl: a CUDA graph"),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "Engine"),
        ({"overlap_p2p_comm": True}, r"overlap_p2p_comm: .* over the default group"),
        ({"distribute_saved_activations": True}, r"distribute_saved_activations: Megatron shares"),
        ({**MOE, "moe_router_load_balancing_type": "global_aux_loss"}, r"global_aux_loss: its cou"),
        ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, r"sinkhorn: it balances"),
        ({**MOE, "moe_expert_capacity_factor": 1.0}, r"moe_expert_capacity_factor"),
        ({**MOE, "moe_input_jitter_eps": 0.1}, r"moe_input_jitter_eps: its noise"),
        ({"qk_clip": True}, r"qk_clip: the weights are changed"),
        ({"finalize_model_grads_func": print}, r"finalize_model_grads_func: gradients are"),
        ({"grad_scale_func": abs}, r"grad_scale_func: it would scale the loss alone"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm"]},
            r"fine_grained_activation_offloading: what it offloads",
        ),
        ({**MOE, "moe_router_topk_limited_devices": 1}, r"moe_router_topk_limited_devices: its gr"),
    ],
    ids=lambda value: str(list(value)[-1]) if isinstance(value, dict) else "",
)
def test_options_with_state_or_by_layout_are_refused_as_the_spec_is_derived(
    options: dict[str, Any], why: str, device: Any
) -> None:
    with pytest.raises(PlanError, match=why):
        derived(Toy(lambda _: {"body": linear()}, **options), "dp1")


def test_what_is_trained_on_several_stages_is_refused_unless_megatron_sums_it(device: Any) -> None:
    """It does so for embeddings alone: other copies would silently drift apart."""
    assert not derived(Toy(lambda _: {"body": linear().requires_grad_(False)}), "pp2").refused
    (said,) = derived(Toy(lambda _: {"body": linear()}), "pp2").refused.values()
    assert said.startswith("body.weight is trained on stages [0, 1], and Megatron does not sum")


@pytest.mark.parametrize(("layout", "told"), [("tp2 sp", False), ("tp2", True), ("tp1", True)])
def test_a_model_that_shares_the_sequence_otherwise_than_the_layout_is_refused(
    layout: str, told: bool, device: Any
) -> None:
    """Megatron would go by the one, and dropout, marks and refusals by the other."""

    class Told(Toy):
        def build(self, context: BuildContext) -> Any:
            model = super().build(context)
            if str(context.layout) == str(Layout.parse(layout)):
                model.config.sequence_parallel = told
            return model

    parts = lambda _: {"body": linear().requires_grad_(False)}  # noqa: E731
    why = rf"sequence_parallel is {told}, where the layout .* has {not told}: .* `megatron_sizes"
    if layout == "tp1":
        with pytest.raises(PlanError, match=why):
            derived(Told(parts), layout)
    else:
        (said,) = derived(Told(parts), layout, "tp1").refused.values()
        assert re.search(why, said)
    assert not derived(Toy(parts), layout).refused


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("variable_seq_lengths", True),
        ("mtp_standalone", True),
        ("num_microbatches_with_partial_activation_checkpoints", 0),
        ("use_ring_exchange_p2p", True),
    ],
)
def test_options_that_a_pipeline_alone_would_fail_with_are_refused_before_one_is_built(
    option: str, value: Any, device: Any
) -> None:
    """Else each handoff to one fails, in words of Megatron's or torch's."""

    class Changed(Toy):
        def build(self, context: BuildContext) -> Any:
            model = super().build(context)
            setattr(model.config, option, value)
            return model

    toy = Changed(lambda _: {"body": linear().requires_grad_(False)})
    refused = derived(toy, "pp2", "dp2").refused
    assert [*refused] == ["tp1 pp2 dp1"]
    assert refused["tp1 pp2 dp1"].startswith(f"{option} with pp: ")


def test_latent_attention_with_tp_wants_sequence_parallelism(device: Any) -> None:
    """Megatron: silently wrong gradients of what every tp rank projects down."""
    latent = Toy(lambda _: {"body": linear().requires_grad_(False)}, multi_latent_attention=True)
    (said,) = derived(latent, "tp2").refused.values()
    assert said.startswith("multi_latent_attention with tp wants sequence parallelism: add sp")
    assert "multi_latent" not in str(derived(latent, "tp2 sp").refused)


def test_what_several_chunks_of_one_stage_hold_is_refused(device: Any) -> None:
    """Only one of them would get values."""
    frozen = Toy(lambda _: {"body": linear().requires_grad_(False)})
    (said,) = derived(frozen, "pp2 vpp2").refused.values()
    assert said == "body.weight: several chunks of one stage hold it: stages [0, 0, 1, 1]"


def test_frozen_layers_that_nobody_knows_and_are_recomputed_are_refused(device: Any) -> None:
    options = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    frozen = linear().requires_grad_(False)
    derived(Toy(lambda _: {"body": linear()}, **options), "dp1")
    with pytest.raises(PlanError, match="recompute_granularity with frozen parameters"):
        derived(Toy(lambda _: {"frozen": frozen, "body": linear()}, **options), "dp1")


@pytest.mark.parametrize(
    "part",
    [lambda: Router(persistent=False), lambda: Scaled(None), lambda: Scaled(torch.empty(0))],
)
def test_what_is_recomputed_or_empty_is_no_state(part: Callable[[], Any], device: Any) -> None:
    world = build_world(Toy(lambda _: {"body": part()}), device)
    assert [tensor.name for tensor in world.recipe.spec.tensors] == ["body.weight"]
    world.close()


def test_what_is_trained_has_one_precision(device: Any) -> None:
    head = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    recipe = Toy(lambda _: {"body": linear(), "head": head})
    told = r"head\.weight is torch\.bfloat16, .* torch\.float32; with bf16=True in the Transf"
    with pytest.raises(PlanError, match=told):
        derived(recipe, "dp1")


def test_a_plain_torch_module_is_told_what_is_wanted() -> None:
    """The first thing that is tried: it may have a `config` of its own kind, or of Megatron's."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    class Given(Toy):
        def build(self, context: BuildContext) -> Any:
            return self.parts(context)

    def with_config(config: Any) -> torch.nn.Module:
        made: Any = linear()
        made.config = config
        return made

    megatron = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    wrong: dict[str, Callable[[], Any]] = {
        "NoneType": lambda: None,
        "Linear": linear,
        "Linear with a dict": lambda: with_config({"width": 8}),
        "Linear with a TransformerConfig": lambda: with_config(megatron),
        "MegatronModule with a dict": lambda: MegatronModule({"width": 8}),
    }
    for name, make in wrong.items():
        told = f"build gave a {name}, wanted a MegatronModule with a TransformerConfig: "
        with pytest.raises(PlanError, match=told):
            derived(Given(lambda _, make=make: make()), "dp1")


def test_a_buffer_whose_elements_are_too_wide_is_refused_by_name(device: Any) -> None:
    def part() -> torch.nn.Linear:
        made = linear()
        made.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
        return made

    with pytest.raises(PlanError, match=r"body\.phase is torch\.complex128: .* at most 8 bytes"):
        derived(Toy(lambda _: {"body": part()}), "dp1")


# ---- values that are drawn as a model is built


class Features(torch.nn.Linear):
    """As random Fourier features: a fixed buffer, drawn once."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__(8, 8, bias=False)
        self.register_buffer("phases", draw() * 2.0)


def test_a_buffer_from_a_generator_of_its_own_has_its_values(device: Any) -> None:
    def draw() -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(5))

    world = build_world(Toy(lambda _: {"body": Features(draw)}), device)
    assert torch.equal(world.chunks[0].module.body.phases.cpu(), draw() * 2.0)
    world.close()


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda: torch.randn(4), r"body\.phases is drawn at random"),
        (lambda: torch.empty(4).uniform_(), r"body\.phases is drawn at random"),
        (lambda: torch.randperm(4), r"the model draws by torch\.randperm"),
        (lambda: (torch.rand(4) < 0.5).float(), r"body\.phases is drawn at random"),
        (lambda: torch.rand(4).topk(2).indices, r"body\.phases is drawn at random"),
        (lambda: torch.tensor(numpy.random.rand(4)), r"the model draws by numpy\.random as"),
        (lambda: torch.full((4,), random.random()), r"the model draws by random as it is built"),
    ],
)
def test_a_buffer_that_workers_would_draw_otherwise_is_refused(
    draw: Callable[[], torch.Tensor], why: str, device: Any
) -> None:
    with pytest.raises((PlanError, ConfigError), match=why):
        build_world(Toy(lambda _: {"body": Features(draw)}), device)


def test_an_attribute_that_workers_would_draw_otherwise_is_refused(device: Any) -> None:
    def parts(_: BuildContext) -> dict[str, Any]:
        body: Any = linear()
        body.order = torch.rand(4).argsort()
        return {"body": body}

    with pytest.raises(PlanError, match=r"body\.order is drawn at random .*, or computed of what"):
        derived(Toy(parts), "dp1")


def test_a_buffer_of_a_parameter_that_is_filled_later_is_refused(device: Any) -> None:
    """As the shadows of an average of weights: it would begin with what lay in memory."""

    def parts(fill: Callable[[torch.Tensor], Any]) -> Toy:
        def of(_: BuildContext) -> dict[str, Any]:
            body = linear()
            fill(body.weight)
            body.register_buffer("shadow", body.weight.clone().detach().data)
            return {"body": body}

        return Toy(of)

    assert not derived(parts(torch.nn.init.ones_), "tp1").refused
    with pytest.raises(PlanError, match=r"body\.shadow is drawn at random .*, or computed of what"):
        derived(parts(torch.nn.init.normal_), "tp1")


def test_a_model_that_reads_values_as_it_is_built_is_told_what_to_do(device: Any) -> None:
    for rates in (
        lambda: [rate.item() for rate in torch.linspace(0, 0.1, 4)],
        lambda: torch.linspace(0, 0.1, 4, device="cpu").tolist(),
        lambda: torch.arange(4).numpy(),
    ):
        read = Toy(lambda _, rates=rates: {"body": Features(lambda: torch.tensor(rates()))})
        assert not derived(read, "tp1").refused
    masked = Toy(lambda _: {"body": linear() if (torch.ones(4) == 1).all() else frozen()})
    with pytest.raises(
        PlanError, match=r"test_own_models\.py, line \d+\): .* compute .* with numpy"
    ):
        derived(masked, "tp1")


# ---- kinds of state that are neither trained nor refused


class Counting(torch.nn.Module):
    """Buffers of several kinds, some of which a forward puts other tensors in the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))  # 0-dim, int64
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("average", torch.zeros(2, 3, 4))

    def count(self) -> None:
        self.calls = self.calls + 1
        self.seen[int(self.calls) % 5] = True
        self.expert_bias = self.expert_bias + 0.1
        self.average.mul_(0.5).add_(1.0)


def counting(**options: Any) -> Toy:
    def parts(_: BuildContext) -> dict[str, Any]:
        return {"body": linear(), "base": frozen(), "counts": Counting()}

    return Toy(parts, **options)


@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_frozen_and_buffers_are_in_the_spec_and_in_a_world(bf16: bool, device: Any) -> None:
    recipe = counting(bf16=bf16)
    world = build_world(recipe, device)
    own = 2 if bf16 else 4
    found = {t.name: (t.role, t.shape, t.element_bytes) for t in recipe.spec.tensors}
    assert found == {
        "body.weight": ("trained", (8, 8), None),
        "base.weight": ("frozen", (8, 8), own),
        "counts.calls": ("buffer", (), 8),
        "counts.seen": ("buffer", (5,), 1),
        "counts.expert_bias": ("buffer", (3,), 4),  # as Megatron's, which bf16 spares
        "counts.average": ("buffer", (2, 3, 4), own),
    }
    assert {recipe.spec.tensors[i].name for i, _ in world.state.boxes("exp_avg")} == {"body.weight"}
    assert {i for i, _ in world.state.boxes("parameter")} == {*range(6)}
    world.close()


def test_a_bit_of_any_kind_of_tensor_is_in_the_digest(device: Any) -> None:
    recipe = counting()
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, seed=1)
    before = world.state.digests(["parameter"])
    for index, tensor in enumerate(recipe.spec.tensors):
        bits = world.state.view("parameter", index, tensor.whole).view(torch.uint8)
        bits[0, 0] ^= 1
        assert world.state.digests(["parameter"]) != before, tensor.name
        bits[0, 0] ^= 1
    assert world.state.digests(["parameter"]) == before
    world.close()


def test_a_bit_of_a_buffer_that_has_changed_on_the_way_calls_a_handoff_off(device: Any) -> None:
    recipe, rank_map = counting(), RankMap(Layout(1, 1, 1), (0,))
    source, target = (build_world(recipe, device) for _ in range(2))
    sides = []
    for name, world in (("source", source), ("target", target)):
        world.state.initialize(recipe.initial, seed=1)
        if name == "target":
            (index,) = (i for i, t in enumerate(recipe.spec.tensors) if t.name == "counts.seen")
            world.state.view("parameter", index, recipe.spec.tensors[index].whole)[3] ^= True
        sides.append(Side(name, rank_map, {0: world.state.digests(["parameter"])}))
        world.close()
    (problem,) = disagreements(*sides)
    assert "parameter (replicated over tp): target copy" in problem


def test_the_step_counter_of_a_second_optimizer_is_moved_and_compared(device: Any) -> None:
    world = build_world(experts(), device, "ep2 dp2")
    first, second = (one.optimizer for one in world.optimizers)
    told = world.scalar_state(5).model_copy(update={"optimizer_step": 5})
    world.load_scalar_state(told)
    for adam in (first, second):
        assert {int(held["step"]) for held in adam.state.values()} == {5}
    assert world.scalar_state(5) == told
    next(iter(second.state.values()))["step"] += 1
    with pytest.raises(PlanError, match=r"Adam's step counters differ: \[5, 6\]"):
        world.scalar_state(5)
    world.close()


def test_a_buffer_that_a_forward_replaces_is_settled_at_the_boundary(device: Any) -> None:
    recipe = counting()
    world = build_world(recipe, device)
    counts = world.chunks[0].module.counts
    counts.count()
    world.settle()
    held = {
        recipe.spec.tensors[index].name: world.state.view("parameter", index, box).flatten()
        for index, box in world.state.boxes("parameter")
    }
    assert held["counts.calls"].tolist() == [1]
    assert held["counts.seen"].tolist() == [False, True, False, False, False]
    assert held["counts.expert_bias"].tolist() == pytest.approx([0.1] * 3)
    world.close()


class Averaging(RandomTokenGPT):
    """A frozen average, which each forward puts another tensor in the place of."""

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        model.average = frozen()

        def average(_module: Any, _inputs: Any, _output: Any) -> None:
            weight = model.average.weight
            weight.data = weight.data * 0.5

        model.embedding.register_forward_hook(average)
        return model


def test_a_frozen_parameter_that_a_forward_replaces_is_the_one_that_is_held(device: Any) -> None:
    """From the rehearsal on, after which values come."""
    config = tiny_config()
    recipe = Averaging(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    (index,) = (i for i, t in enumerate(recipe.spec.tensors) if t.name == "average.weight")
    weight = world.tensors[index]

    def held() -> torch.Tensor:
        return world.state.view("parameter", index, recipe.spec.tensors[index].whole)

    world.warm_up()
    held().fill_(2.0)
    assert weight.unique().tolist() == [2.0]
    weight.data = weight.data * 0.5
    world.settle()
    assert held().unique().tolist() == [1.0]
    world.close()


class Writing(RandomTokenGPT):
    """Its forward writes to a parameter, in one of the ways that scripts have."""

    how = ""

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        model.embedding.limited = torch.nn.Embedding(4, 8, max_norm=1.0)
        weight = model.embedding.limited.weight

        def write(_module: Any, _inputs: Any) -> None:
            if self.how == "max_norm":
                model.embedding.limited(torch.tensor([1], device=weight.device))
            elif self.how == "clamp":
                weight.data.clamp_(-0.01, 0.01)
            elif self.how == "average":
                with torch.no_grad():
                    weight.mul_(0.9).add_(weight, alpha=0.1)

        weight.requires_grad_(self.how != "average")
        model.embedding.register_forward_pre_hook(write)
        return model


@pytest.mark.parametrize("how", ["", "max_norm", "clamp", "average"])
def test_a_forward_that_writes_to_a_parameter_is_refused_by_name(
    how: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writing, "how", how)
    config = tiny_config()
    recipe = Writing(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    refused = pytest.raises(PlanError, match=r"a forward writes to embedding\.limited\.weight")
    with refused if how else nullcontext():
        world.warm_up()
    world.close()


class Late(RandomTokenGPT):
    """Has state of its own from its first forward on: a new buffer, one that was None, or extra."""

    how = "new"

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        part = model.embedding
        if self.how == "none":
            part.register_buffer("seen", None)
        elif self.how == "extra":
            part.seen = Scaled(torch.empty(0))

        def forward(*_of: Any) -> None:
            if self.how == "extra":
                part.seen.extra = torch.ones(2)
            else:
                part.register_buffer("seen", torch.ones(2))

        part.register_forward_hook(forward)
        return model


@pytest.mark.parametrize("rehearsed", [True, False])
@pytest.mark.parametrize(("how", "dtype"), [("new", "fp32"), ("none", "bf16"), ("extra", "bf16")])
def test_state_that_comes_to_be_in_the_first_forward_is_refused_by_name(
    how: str, dtype: str, rehearsed: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "how", how)
    config = tiny_config(dtype=dtype)
    recipe = Late(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    world.settle()
    if not rehearsed:
        with thread.rehearsal():
            world.forward_backward(0, most=1)
    why = r"embedding\.seen(\._extra_state is not moved| came to be in a forward, after)"
    with pytest.raises(PlanError, match=why):
        world.warm_up() if rehearsed else world.settle()
    world.close()


def test_a_buffer_that_becomes_another_one_is_refused_by_name(device: Any) -> None:
    world = build_world(counting(), device)
    world.chunks[0].module.counts.calls = torch.zeros(2)
    with pytest.raises(PlanError, match=r"counts\.calls' is \[2\] of torch\.float32 now, was \[\]"):
        world.settle()
    world.chunks[0].module.counts.calls = None
    with pytest.raises(PlanError, match=r"Counting has dropped its buffer calls"):
        world.settle()
    world.close()


def test_a_stage_on_which_nothing_is_trained_is_built_and_counts_steps(device: Any) -> None:
    world = build_world(Toy(lambda _: {"base": frozen()}), device)
    assert world.update(0) == (0.0, pytest.approx(0.001))
    assert world.scalar_state(7).optimizer_step == 7
    others = world.scalar_state(7).model_copy(update={"optimizer_step": 5})  # as of a script's job
    world.load_scalar_state(others)
    assert world.scalar_state(9).optimizer_step == 7, "as those count who train something"
    world.close()


def test_a_tensor_of_more_dimensions_is_held_as_it_is(device: Any) -> None:
    recipe = Toy(lambda _: {"conv": torch.nn.Conv2d(2, 4, 3, bias=False)})
    world = build_world(recipe, device)
    assert recipe.spec.tensors[0].shape == (4, 2, 3, 3)
    world.state.initialize(recipe.initial, seed=1)
    held = world.state.view("parameter", 0, recipe.spec.tensors[0].whole)
    assert torch.equal(held, world.chunks[0].module.conv.weight.detach().view(4, 18))
    world.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("experimental_attention_variant", "dsa"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "a_new_one"]),
        ("moe_router_force_biased", 1.0),
        ("moe_expert_rank_capacity_factor", 1.5),
        ("moe_grad_scale_func", lambda: 2.0),
        ("mtp_grad_scale_func", lambda: 2.0),
    ],
)
def test_what_one_scale_or_balance_of_a_process_rules_is_refused(option: str, value: Any) -> None:
    config = SimpleNamespace(
        num_moe_experts=4,
        expert_tensor_parallel_size=None,
        moe_router_load_balancing_type="aux_loss",
        moe_expert_capacity_factor=None,
        calculate_per_token_loss=False,
    )
    layout = Layout.parse("dp2")
    assert not [*refused._layout_dependent(config, layout)]
    setattr(config, option, value)
    (problem,) = refused._layout_dependent(config, layout)
    assert problem.startswith(option)


def test_samples_are_read_by_one_thread_at_a_time_in_the_groups_of_their_world(
    device: Any,
) -> None:
    """So a data set may ask for Megatron's arguments, and need not be made for several readers."""
    toy = Toy(lambda _: {"body": linear()})
    toy.spec = derived(toy, "dp1")
    readers, seen, met = 0, [], threading.Barrier(2)

    def fetch(samples: Any, layout: Any, at: Any) -> Any:
        nonlocal readers
        readers += 1
        seen.append((thread.here.groups, readers))
        time.sleep(0.05)
        readers -= 1

    worlds = [build_world(toy, device) for _ in range(2)]
    toy.fetch = fetch  # type: ignore[method-assign]

    def read(world: Any) -> None:
        met.wait(10.0)
        world.batches.fetch([0])

    others = [threading.Thread(target=read, args=(world,)) for world in worlds]
    for one in others:
        one.start()
    for one in others:
        one.join()
    assert {id(groups) for groups, _ in seen} == {id(world.groups) for world in worlds}
    assert [count for _, count in seen] == [1, 1]
    for world in worlds:
        world.close()


@pytest.mark.parametrize("cp", [1, 2])
def test_a_loss_function_that_gives_a_mean_alone_has_no_context_parallelism(
    cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        thread.here, "groups", SimpleNamespace(cp=SimpleNamespace(size=lambda: cp)), raising=False
    )
    mean = mean_of(lambda output: (output.mean(), {"lm loss": output.mean()}))
    if cp == 1:
        loss, reported = mean(torch.ones(4))
        assert (float(loss), float(reported["loss"])) == (1.0, 1.0)
    else:
        with pytest.raises(PlanError, match=r"gives \(mean, report\).*with cp give"):
            mean(torch.ones(4))


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

    with pytest.raises(ConfigError, match=r"pp2 dp1 no worker holds layers\.2\.weight, layers\.3"):
        derived(Toy(parts), "pp2").check_layout(Layout(1, 2, 1))


def test_a_split_that_the_module_does_not_declare_is_refused(device: Any) -> None:
    def parts(context: BuildContext) -> dict[str, Any]:
        return {"body": torch.nn.Linear(8, 8 // context.layout.tp, bias=False)}

    spec = derived(Toy(parts), "tp2")
    with pytest.raises(ConfigError, match=r"body\.weight.* does not say how it is split"):
        spec.check_layout(Layout(2, 1, 1))


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
            perform_initialization=context.draws,
        )  # fmt: skip
        own = Own(
            8, 8, config=config, init_method=config.init_method, bias=True,
            tp_group=context.groups.tp,
        )  # fmt: skip
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


class Dropping(RandomTokenGPT):
    """Drops with a rate that no module has, unless its embedding is told."""

    tells = False

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        if self.tells:
            model.embedding.resid_pdrop = 0.1

        def drop(module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(states, 0.1, module.training)

        model.embedding.register_forward_hook(drop)
        return model


@pytest.mark.parametrize("tells", [False, True])
def test_dropout_that_is_not_seeded_is_refused_by_the_rehearsal(
    tells: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it is not seen."""
    monkeypatch.setattr(Dropping, "tells", tells)
    config = tiny_config()
    recipe = Dropping(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    refused = pytest.raises(PlanError, match=r"calls dropout with a rate of 0\.1 which no module")
    with nullcontext() if tells or device.late else refused:
        world.warm_up()
    world.close()


@pytest.mark.parametrize("layout", ["pp2", "pp2 vpp2"])
@pytest.mark.parametrize(("numbered", "rate"), [(False, 0.2), (True, 0.2), (False, 0.0)])
def test_a_pipeline_that_drops_in_layers_without_numbers_is_refused(
    numbered: bool, rate: float, layout: str, device: Any
) -> None:
    """Each chunk would begin with the masks of the first."""

    def block(number: int) -> Any:
        made: Any = torch.nn.Sequential(linear(), torch.nn.Dropout(rate))
        if numbered:
            made.layer_number = number + 1
        return made

    def parts(context: BuildContext) -> dict[str, Any]:
        stages, chunks = context.layout.pp, context.layout.vpp
        each = 4 // (stages * chunks)
        first = each * (stages * context.chunk + context.at.pp)
        blocks = {str(number): block(number) for number in range(first, first + each)}
        return {"layers": torch.nn.ModuleDict(blocks)}

    refused = derived(Toy(parts, hidden_dropout=0.0, attention_dropout=0.0), layout, "dp1").refused
    if numbered or not rate:
        assert not refused
    else:
        (said,) = refused.values()
        assert re.match(r"layers\.\d\.1 drops in a chunk .* wanted `layer_number` in each", said)


class Noisy(RandomTokenGPT):
    """Draws noise in its forward, or where it reads a sample, without dropout anywhere."""

    draw: Callable[[torch.Tensor], torch.Tensor]
    seeds = reads = reads_seeded = False

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        if context.is_first_stage and not self.reads:
            model.embedding.register_forward_hook(
                lambda _module, _inputs, states: states + type(self).draw(states)
            )
        return model

    def fetch(self, samples: Any, layout: Any, at: Any) -> Any:
        if self.reads_seeded:
            torch.manual_seed(samples[0])
        if self.reads:
            type(self).draw(torch.zeros(1))
        return super().fetch(samples, layout, at)

    def loss(self, model: Any, samples: Any) -> Any:
        if self.seeds:
            torch.manual_seed(torch.tensor(5))  # torch takes whatever is an int
        return super().loss(model, samples)


def own_noise(states: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(states.device).manual_seed(1)
    return torch.empty_like(states).uniform_(generator=generator)


@pytest.mark.parametrize(
    ("draw", "told", "refused_as"),
    [
        (lambda s: torch.empty_like(s).uniform_(-0.1, 0.1), {}, "uniform_"),
        (lambda s: torch.randn_like(s), {}, "randn_like"),
        (lambda s: s[:, torch.randperm(s.shape[1])], {}, "randperm"),
        (lambda s: torch.nn.functional.gumbel_softmax(s), {}, "gumbel_softmax"),
        (lambda s: torch.nn.functional.rrelu(s, training=True), {}, "rrelu"),
        (lambda s: torch.nn.functional.rrelu(s), {}, None),
        (lambda s: s * torch.distributions.Beta(0.4, 0.4).sample(), {}, "_sample_dirichlet"),
        (own_noise, {}, None),
        (lambda s: torch.empty_like(s).uniform_(), {"seeds": True}, None),
        (lambda s: torch.randn_like(s), {"reads": True}, "randn_like"),
        (own_noise, {"reads": True}, None),
        (lambda s: torch.randn_like(s), {"reads": True, "reads_seeded": True}, None),
        (lambda s: torch.randn_like(s), {"reads_seeded": True}, "randn_like"),
        (lambda s: torch.empty_like(s).zero_(), {}, None),
    ],
)
def test_noise_that_is_not_seeded_is_refused_by_the_rehearsal(
    draw: Any, told: dict[str, bool], refused_as: str | None, device: Any
) -> None:
    """Those who stay would draw on, and a joiner from the beginning. On a GPU it is not seen."""
    config = tiny_config()
    kind = type("Kind", (Noisy,), {"draw": staticmethod(draw), **told})
    recipe = kind(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device, "pp2 vpp2")
    refused = pytest.raises(PlanError, match=rf"draws by {refused_as} without a generator")
    with refused if refused_as and not device.late else nullcontext():
        world.warm_up()
    world.close()


class Diffusing(RandomTokenGPT):
    """Draws noise in its loss before the model goes forward, or goes forward again behind it."""

    again = False

    def loss(self, model: Any, samples: Any) -> Any:
        self.drawn.append(torch.rand(1).item())
        output = super().loss(model, samples)
        return super().loss(model, samples) if self.again else output


def diffusing(again: bool = False) -> Any:
    config = tiny_config(dropout=0.2)
    recipe: Any = Diffusing(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    recipe.again, recipe.drawn = again, []
    return recipe


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_loss_draws_before_the_model_goes_forward_is_of_its_samples(
    on_gpu: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else of those before: tensor-parallel ranks would draw apart after a handoff. on_gpu: where
    Megatron seeds the device's streams, and the loss draws from the host's."""
    from liver_hpc.world.megatron import megatron_random

    plain = megatron_random.model_parallel_cuda_manual_seed

    def seed_device(*given: Any, **named: Any) -> None:
        host = torch.get_rng_state()
        plain(*given, **named)
        torch.set_rng_state(host)

    if on_gpu:
        monkeypatch.setattr(megatron_random, "model_parallel_cuda_manual_seed", seed_device)
    recipe = diffusing()
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, seed=3)
    for step in (0, 1, 1):
        world.forward_backward(step)
    world.close()
    first, then, again = (recipe.drawn[begin : begin + 8] for begin in (0, 8, 16))
    assert again == then
    assert len({*first, *then}) == 16


def test_a_model_that_would_drop_the_same_elements_twice_is_refused(device: Any) -> None:
    world = build_world(diffusing(again=True), device)
    with pytest.raises(PlanError, match=r"goes forward twice in a micro-batch"):
        world.warm_up()
    world.close()


class Numbered(torch.nn.Dropout):
    """A layer before the decoder's, in a stack whose numbers begin at 1 as those do."""

    layer_number = 1


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_layers_of_one_number_that_would_drop_the_same_elements_are_refused(
    rate: float, device: Any
) -> None:
    """As those of an encoder and a decoder."""

    class TwoStacks(RandomTokenGPT):
        def build(self, context: BuildContext) -> Any:
            model, before = super().build(context), Numbered(rate)
            model.before = torch.nn.ModuleList([before])
            model.embedding.register_forward_hook(lambda _module, _inputs, states: before(states))
            return model

    config = tiny_config(dropout=0.2)
    recipe = TwoStacks(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    why = r"a Numbered and a TransformerLayer that drop both have layer_number 1, and would drop"
    with pytest.raises(PlanError, match=why) if rate else nullcontext():
        world.warm_up()
    world.close()


class Plainly(RandomTokenGPT):
    """Gives the loss itself, as in a plain loop; or its loss function does."""

    inside = False

    def loss(self, model: Any, samples: Any) -> Any:
        output, _ = super().loss(model, samples)
        return (output, torch.mean) if self.inside else output.mean()


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_without_what_belongs_to_it_is_told_what_is_wanted(
    inside: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plainly, "inside", inside)
    config = tiny_config()
    recipe = Plainly(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device)
    who = "the function that loss gives" if inside else "loss"
    with pytest.raises(PlanError, match=rf"Plainly: {who} gave a tensor of shape \[\], wanted of"):
        world.warm_up()
    world.close()


class Checking(RandomTokenGPT):
    """Looks at what it computes, as scripts do."""

    def loss(self, model: Any, samples: Any) -> Any:
        output, loss_function = super().loss(model, samples)
        assert output.isfinite().all()
        return output, loss_function


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What torch.empty gives is NaN throughout."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(("layout", "worker"), [("tp2 sp", 0), ("pp2", 1)])
def test_a_rehearsal_computes_with_sane_numbers(layout: str, worker: int, device: Any) -> None:
    """Whatever lies in the memory of parameters that have no values yet."""
    config = tiny_config()
    recipe = Checking(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device, layout, worker)
    world.warm_up()
    world.close()


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


def train(device: Any, steps: int, **model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a model with dropout, and where the streams stand after them."""
    from liver_hpc.world.megatron import seed_dropout

    seed_dropout(11, tp_rank=0)
    recipe = tiny_recipe(dropout=0.2, **model)
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, seed=3)
    losses = []
    for step in range(steps):
        losses.append(world.forward_backward(step).loss_sum)
        world.update(step)
    world.close()
    return losses, streams()


def leaves_no_trace(device: Any, work: Callable[[], None], steps: int, **model: Any) -> None:
    """Training's losses and streams of random numbers are those of a quiet run, bit for bit, while
    another thread works."""
    quiet, quiet_streams = train(device, steps, **model)
    stop, done, failures = threading.Event(), [], []

    def go_on() -> None:
        try:
            while not stop.is_set():
                work()
                done.append(1)
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(f"{type(error).__name__}: {error}")

    worker = threading.Thread(target=go_on)
    worker.start()
    try:
        beside, beside_streams = train(device, steps, **model)
    finally:
        stop.set()
        worker.join(60)
    assert failures == []
    assert len(done) > 1
    assert beside == quiet
    assert beside_streams.keys() == quiet_streams.keys()
    for name, stream in quiet_streams.items():
        assert torch.equal(beside_streams[name], stream), name


def test_a_model_that_fills_its_weights_is_built_beside_training_without_a_trace(
    device: Any,
) -> None:
    config = tiny_config()
    recipe = InitializingGPT(GPTConfig.model_validate(config.model), config)
    leaves_no_trace(device, lambda: build_world(recipe, device, "tp2").close(), steps=4)


@pytest.mark.parametrize(
    ("recipe_class", "layout"),
    [
        (RandomTokenGPT, "tp2"),
        pytest.param(TorchCheckpoints, "pp2 vpp2", marks=pytest.mark.long),
        pytest.param(RandomTokenGPT, "cp2", marks=pytest.mark.long),
        pytest.param(RandomTokenGPT, "tp2 sp", marks=pytest.mark.long),
    ],
)
def test_a_rehearsal_with_dropout_and_recomputation_leaves_no_trace_in_training(
    recipe_class: type[RandomTokenGPT], layout: str, device: Any
) -> None:
    """What is computed again sets streams back and forth, and drops: both in the backward."""
    recompute = {} if recipe_class is TorchCheckpoints else {"recompute": "full"}
    config = tiny_config(dropout=0.3, **recompute)
    recipe = recipe_class(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())

    def rehearse() -> None:
        world = build_world(recipe, device, layout)
        world.warm_up()
        world.close()

    leaves_no_trace(device, rehearse, steps=6, recompute="full")


class Drawing(RandomTokenGPT):
    """Drops paths by what it draws itself, adds noise, and seeds streams in its loss."""

    def build(self, context: BuildContext) -> Any:
        model = super().build(context)
        model.embedding.drop_prob = 0.1

        def drop(module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
            kept = states.new_empty(1, states.shape[1], 1).bernoulli_(1 - module.drop_prob)
            return states * kept + 1e-3 * torch.randn_like(states) * torch.rand(1).item()

        model.embedding.register_forward_hook(drop)
        return model

    def loss(self, model: Any, samples: Any) -> Any:
        generator = torch.manual_seed(5)
        assert torch.rand(1, generator=generator).item() == pytest.approx(0.8303, abs=1e-3)
        return super().loss(model, samples)


def test_a_rehearsal_that_draws_and_seeds_takes_nothing_from_training(device: Any) -> None:
    config = tiny_config()
    recipe = Drawing(GPTConfig.model_validate(config.model), config)
    recipe.open(Path())
    world = build_world(recipe, device, "tp2")
    before = streams()
    world.warm_up()
    after = streams()
    world.close()
    assert before.keys() == after.keys()
    for name, stream in before.items():
        assert torch.equal(after[name], stream), name


def test_no_rank_is_asked_for_gradient_norms_of_their_own(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron 0.19 would ask all ranks, as often as each has optimizers, and in a rehearsal
    stand-ins."""
    from liver_hpc.world import megatron

    module: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    monkeypatch.setattr(module, "SEPARATE_GRAD_NORM_GROUPS", ("mtp",), raising=False)
    monkeypatch.setattr(module, "GRAD_NORM_GROUP_ATTR", "grad_norm_group", raising=False)
    world = build_world(tiny_recipe(), device, "dp2")
    assert world.optimizer._has_grad_norm_group_cache == {"mtp": False}
    (chunk,) = world.chunks
    tagged: Any = next(chunk.parameters())
    tagged.grad_norm_group = "mtp"
    with pytest.raises(ConfigError, match="has a gradient norm of its own, that of the group 'mtp"):
        megatron.answer_norm_groups(world.optimizer, world.chunks)
    world.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_are_added_up_by_nodes_that_are_new_and_once(device: Any, dtype: str) -> None:
    """On a GPU a node works on the stream on which it came to be: PREPARE's, which is another
    one's after that."""
    world = build_world(tiny_recipe(dtype=dtype), device, "tp2")
    world.warm_up()
    (chunk,) = world.chunks
    generator = torch.Generator().manual_seed(1)
    for parameter in chunk.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    def gradients() -> list[torch.Tensor]:
        with thread.rehearsal():
            world.forward_backward(0, most=1)
        found = [parameter.main_grad.clone() for parameter in chunk.parameters()]
        world._clear_gradients()
        return found

    before = gradients()
    for node in chunk.grad_accs:
        node.metadata["old"] = True
    del node
    world.accumulate_in_training_lane()
    assert not any("old" in node.metadata for node in chunk.grad_accs)
    assert [node.variable for node in chunk.grad_accs] == [*chunk.parameters()]
    for one, other in zip(before, gradients(), strict=True):
        assert one.any()
        assert torch.equal(one, other)
    world.close()


def test_a_world_that_is_still_written_to_keeps_its_memory_until_that_has_ended(
    device: Any,
) -> None:
    for written_to in (False, True):
        world = build_world(tiny_recipe(), device, "dp2")
        (buffer,) = world.chunks[0].buffers
        gradients = buffer.grad_data.untyped_storage()
        held = weakref.ref(world.state)
        world.abandon(written_to=written_to)
        del world, buffer
        gc.collect()
        assert (gradients.nbytes() > 0) is (held() is not None) is written_to
    device.return_free_memory()
    assert held() is None
