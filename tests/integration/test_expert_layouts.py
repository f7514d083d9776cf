"""Experts and sequence parallelism in the layout: against Megatron itself on every seat of a grid;
what would be silently wrong is refused. All on stand-in groups, in one process."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError, PlanError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.votes import Side, disagreements
from liver_hpc.recipes.base import BuildContext
from tests.integration.predicting import PredictingGPT
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.test_experts import AUX, BIAS, RECOMPUTING, SIZES, model
from tests.integration.toys import build_world, derived
from tests.integration.worlds import Case, begin_at, recipe_of


def gpt(options: dict[str, Any], recipe: type[RandomTokenGPT] = RandomTokenGPT) -> Any:
    return recipe_of(Case("dp1", options, recipe=recipe), 0)


# ---- the layout oracle


def grid() -> list[Layout]:
    found = []
    for tp, (pp, vpp), cp, dp in itertools.product(
        (1, 2), ((1, 1), (2, 1), (2, 2)), (1, 2), (1, 2)
    ):
        eps = [ep for ep in (1, 2, 4) if dp * cp % ep == 0]
        found += [Layout(tp, pp, dp, cp, ep, vpp, tp > 1) for ep in eps]
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "options",
    [
        model(shared_ffn_hidden=24, **BIAS) | {"layers": 4},
        pytest.param(
            model("bf16", layer_freq=2) | {"layers": 4, "tied_embeddings": False},
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_seat_holds_what_the_derived_spec_says(options: dict[str, Any], device: Any) -> None:
    """A world compares its modules and its optimizers' real intervals with the spec as it is built;
    the intervals of all seats together cover each tensor once for every copy."""
    recipe, layouts = gpt(options), grid()
    spec = recipe.spec = derived(recipe, *map(str, layouts))
    assert spec.refused == {}
    seats = 0
    for layout in layouts:
        covered: Counter[int] = Counter()
        for worker in range(layout.workers):
            world = build_world(recipe, device, str(layout), worker)
            experts = any(spec.tensors[index].expert for index in world.state._held)
            assert len(world.optimizers) == (2 if layout.ep > 1 and experts else 1)
            for index, held in world.state._held.items():
                covered[index] += held.interval[1] - held.interval[0]
            world.close()
            seats += 1
        for index, tensor in enumerate(spec.tensors):
            tp_copies = layout.tp if tensor.tp_dim is None else 1
            copies = tp_copies * len(spec.stages_of(index, layout))
            wanted = tensor.elements * copies if tensor.role == "trained" else 0
            assert covered[index] == wanted, (str(layout), tensor)
    assert (len(layouts), seats) == (48, 315)


def test_each_expert_has_one_home(device: Any) -> None:
    recipe = gpt(model())
    spec = derived(recipe, "dp4 ep4", "tp2 dp2 ep2 sp")
    for ep, number in ((4, 1), (2, 2)):
        homes = {
            tensor.name: home
            for tensor, home in zip(spec.tensors, spec.homes[ep], strict=True)
            if ".experts." in tensor.name
        }
        assert homes == {
            name: int(name.partition("local_experts.")[2].partition(".")[0]) // number
            for name in homes
        }
        assert len(homes) == 2 * 4 * 2
    assert all(tensor.expert == (".experts." in tensor.name) for tensor in spec.tensors)


# ---- what the recipe refuses


@pytest.mark.parametrize(
    ("options", "layout", "said"),
    [
        (SIZES, "dp2 ep2", "ep=2 wants model.experts.number: the model has no experts"),
        (model(number=6), "dp4 ep4", "ep=4 does not divide 6 experts"),
        (model(), "tp2", "experts with tp want sequence parallelism: add sp"),
        (SIZES | {"seq_length": 17}, "tp2 sp", "17 is not a multiple of tp x cp = 2"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_in_words(
    options: dict[str, Any], layout: str, said: str, device: Any
) -> None:
    with pytest.raises(ConfigError, match=said):
        gpt(options).check_layout(Layout.parse(layout))


# ---- what would be silently wrong is refused


def with_options(**changed: Any) -> type[RandomTokenGPT]:
    """A recipe of one's own that sets options of Megatron."""

    class Changed(RandomTokenGPT):
        def _transformer_config(self, layout: Layout) -> Any:
            config = super()._transformer_config(layout)
            for name, value in changed.items():
                setattr(config, name, value)
            return config

    return Changed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "its counts run on across steps"),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.1],
            },
            "its counts run on across steps",
        ),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "balances the tokens of one rank"),
        ({"overlap_moe_expert_parallel_comm": True}, "its schedule asks a model for its parts"),
        ({"moe_expert_capacity_factor": 1.0}, "which tokens are dropped depends on"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size is 2: it must be tp, 1"),
    ],
)
def test_options_that_compute_something_else_in_another_layout_are_refused_at_derivation(
    changed: dict[str, Any], said: str, device: Any
) -> None:
    recipe = gpt(model())
    wrong = with_options(**changed)(recipe.options, recipe.config)
    with pytest.raises(PlanError, match=said):
        derived(wrong, "dp2 ep2")


def test_experts_that_are_split_otherwise_than_the_rest_are_refused(device: Any) -> None:
    """Megatron: silently wrong gradients with tp 2, expert tp 1, ep 1."""
    recipe = gpt(model())
    whole = with_options(expert_tensor_parallel_size=1)(recipe.options, recipe.config)
    refused = derived(whole, "tp2 sp").refused
    assert "expert_tensor_parallel_size is 1: it must be tp, 2" in refused["tp2 pp1 dp1 sp"]


def test_experts_with_tp_but_without_sequence_parallelism_are_refused(device: Any) -> None:
    refused = derived(gpt(model()), "tp2").refused
    assert "experts with tp want sequence parallelism" in refused["tp2 pp1 dp1"]


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.input_layernorm.weight", "decoder.final_layernorm.bias"]
)
def test_a_norm_without_its_mark_is_refused_with_sequence_parallelism(
    name: str, device: Any
) -> None:
    """Megatron would not sum its gradients over tp ranks, and the copies would drift apart."""

    class Unmarked(RandomTokenGPT):
        def build(self, context: BuildContext) -> Any:
            module = super().build(context)
            del module.get_parameter(name).sequence_parallel
            return module

    recipe = gpt(SIZES | {"normalization": "layernorm"}, Unmarked)
    spec = derived(recipe, "tp2 sp", "tp2")
    assert [*spec.refused] == ["tp2 pp1 dp1 sp"]
    assert name in spec.refused["tp2 pp1 dp1 sp"]
    assert "set its attribute sequence_parallel" in spec.refused["tp2 pp1 dp1 sp"]


def test_an_embedding_of_ones_own_wants_its_mark_with_sequence_parallelism(device: Any) -> None:
    """Who knows whether it is added to the whole sequence or to shares? Megatron's are to the
    whole."""

    class Kinds(RandomTokenGPT):
        marked = False

        def build(self, context: BuildContext) -> Any:
            module = super().build(context)
            module.kinds = torch.nn.Embedding(2, self.options.hidden)
            if self.marked:
                module.kinds.weight.sequence_parallel = True
            return module

    class Marked(Kinds):
        marked = True

    learned = SIZES | {"position": "learned"}
    (said,) = derived(gpt(learned, Kinds), "tp2 sp", "tp2").refused.values()
    assert said.startswith("kinds.weight does not say whether its gradient is a share")
    assert not derived(gpt(learned, Marked), "tp2 sp").refused


def test_a_world_that_would_not_move_the_experts_optimizer_is_refused(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liver_hpc.world import optimizer

    plain = optimizer.get_megatron_optimizer

    def first_of_chain(*arguments: Any, **options: Any) -> Any:
        chain = plain(*arguments, **options)
        assert len(chain.chained_optimizers) == 2
        del chain.chained_optimizers[1]
        return chain

    monkeypatch.setattr(optimizer, "get_megatron_optimizer", first_of_chain)
    with pytest.raises(PlanError, match=r"optimizer state of .*local_experts.* covers \(0, 0\)"):
        build_world(gpt(model()), device, "dp2 ep2")


# ---- copies of experts


def digests(recipe: Any, device: Any, layout: Layout, spoil: int | None = None) -> Side:
    told = {}
    for worker in range(layout.workers):
        world = build_world(recipe, device, str(layout), worker)
        world.state.initialize(recipe.initial, seed=3)
        if worker == spoil:
            expert = next(i for i in world.tensors if recipe.spec.tensors[i].expert)
            world.tensors[expert].data.view(-1)[5] += 1
        told[worker] = world.state.digests(recipe.spec.kinds)
        world.close()
    return Side(str(layout), RankMap(layout, tuple(range(layout.workers))), told)


def test_ranks_with_other_experts_are_no_copies_of_each_other(device: Any) -> None:
    recipe = gpt(model())
    layouts = ("dp4 ep2", "tp2 dp2 ep2 sp", "dp1")
    recipe.spec = derived(recipe, *layouts)
    sides = [digests(recipe, device, Layout.parse(layout)) for layout in layouts]
    assert disagreements(*sides) == []
    told = {
        worker: tuple(digest.model_copy(update={"expert": False}) for digest in digests)
        for worker, digests in sides[0].digests.items()
    }
    assert disagreements(Side("unaware", sides[0].rank_map, told)) != []


def test_a_copy_of_an_expert_that_differs_is_found(device: Any) -> None:
    recipe = gpt(model())
    recipe.spec = derived(recipe, "dp4 ep2")
    found = disagreements(digests(recipe, device, Layout.parse("dp4 ep2"), spoil=2))
    assert any("of experts" in text and "workers 2-3" in text for text in found), found


# ---- what is one a process in Megatron


def trained(recipe: Any, device: Any, steps: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of one worker."""
    world = build_world(recipe, device)
    world.state.initialize(recipe.initial, seed=3)
    begin_at(world, 0)
    done = [(world.forward_backward(step), world.update(step)) for step in range(steps)]
    world.close()
    return [(gradients.loss_sum, update[0]) for gradients, update in done]


def test_a_rehearsal_beside_training_does_not_scale_its_auxiliary_losses(device: Any) -> None:
    """It has fewer micro-batches; training's results are those of a quiet run, bit for bit."""
    steps = 3
    recipe, other = gpt(model(**AUX, **BIAS)), gpt(model(**AUX, **BIAS))
    quiet = trained(recipe, device, steps)
    other.spec = derived(other, "pp2 dp2 ep2", "dp1")
    recipe.spec = other.spec
    stop, rehearsed = threading.Event(), []

    def rehearse() -> None:
        while not stop.is_set():
            world = build_world(other, device, "pp2 dp2 ep2", 3)
            world.warm_up()
            world.close()
            rehearsed.append(1)

    thread = threading.Thread(target=rehearse)
    thread.start()
    try:
        beside = trained(recipe, device, steps)
    finally:
        stop.set()
        thread.join(60)
    assert beside == quiet
    assert rehearsed


@pytest.fixture
def kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers' counts are not put to zero at the end of a batch."""
    from megatron.core.distributed import finalize_model_grads

    names = finalize_model_grads.__globals__
    monkeypatch.setitem(names, "reset_model_temporary_tensors", lambda *_: None)


def counts(recipe: Any, device: Any, layout: str, worker: int) -> list[torch.Tensor]:
    """Of each router of a seat, the tokens that each expert is sent in one batch."""
    world = build_world(recipe, device, layout, worker)
    world.state.initialize(recipe.initial, seed=3)
    world.forward_backward(0)
    routers = [part for part in world.chunks[0].modules() if hasattr(part, "expert_bias")]
    found = [router.local_tokens_per_expert.clone() for router in routers]
    world.close()
    return found


@pytest.mark.usefixtures("kept_counts")
def test_counts_of_a_model_in_bf16_do_not_end_at_256(device: Any) -> None:
    recipe = gpt(model("bf16", **BIAS) | {"seq_length": 256})
    found = counts(recipe, device, "dp1", 0)
    assert [count.sum() for count in found] == [8 * 256 * 2] * 2
    assert all(count.max() > 512 for count in found)


@pytest.mark.usefixtures("kept_counts")
@pytest.mark.parametrize("recompute", [{}, RECOMPUTING])
@pytest.mark.parametrize("layout", ["dp3 ep3", "pp2 dp3 ep3"])
def test_tokens_of_micro_batches_that_count_nowhere_are_not_counted(
    layout: str, recompute: dict[str, str], device: Any
) -> None:
    """8 micro-batches on 3 ranks, which compute 3 each. Recomputed layers of a pipeline count in
    the backward pass, when another micro-batch has gone forward since."""
    recipe = gpt(model(number=6, **BIAS) | recompute)
    for dp_rank, micro_batches in enumerate((3, 3, 2)):
        for count in counts(recipe, device, layout, dp_rank):
            assert count.sum() == micro_batches * 16 * 2, dp_rank


@pytest.mark.parametrize(
    ("options", "recipe_class"),
    [
        (model(**AUX, **BIAS), RandomTokenGPT),
        (model(dispatcher="allgather", shared_ffn_hidden=24, **AUX), RandomTokenGPT),
        (model(), PredictingGPT),
    ],
)
def test_a_closed_world_is_freed_at_once(
    options: dict[str, Any], recipe_class: type[RandomTokenGPT], device: Any
) -> None:
    """Peers may wait in one of its groups until nothing holds that any more."""
    recipe = gpt(options, recipe_class)
    world = build_world(recipe, device, "tp2 dp2 ep2 sp", 1)
    world.warm_up()
    gone: list[Callable[[], Any]] = [weakref.ref(part) for part in world.chunks[0].modules()]
    gone += [weakref.ref(part) for part in world.chunks[0].parameters()]
    gone += [weakref.ref(group.process_group) for group in world.book._groups.values()]
    world.close()
    left = [type(found()) for found in gone if found() is not None]
    assert left == []


def test_a_rehearsal_of_experts_leaves_the_biases_of_their_routers(device: Any) -> None:
    recipe = gpt(model(**BIAS))
    for worker in range(2):
        world = build_world(recipe, device, "dp2 ep2", worker)
        for place in world._buffers.values():
            place.tensor.fill_(0.25)
        world.warm_up()
        routers = [part for part in world.chunks[0].modules() if hasattr(part, "expert_bias")]
        for router in routers:
            assert torch.equal(router.expert_bias.cpu(), torch.full((4,), 0.25))
            assert not router.local_tokens_per_expert.any()
        world.close()


def test_two_worlds_copy_their_counts_on_different_streams(device: Any) -> None:
    recipe = gpt(model())
    worlds = [build_world(recipe, device) for _ in range(2)]
    streams = {
        part.token_dispatcher.cuda_dtoh_stream
        for world in worlds
        for part in world.chunks[0].modules()
        if hasattr(part, "token_dispatcher")
    }
    assert len(streams) == 2
    for world in worlds:
        world.close()
