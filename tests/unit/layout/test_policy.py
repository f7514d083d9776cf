from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from liver_hpc.config.schema import RunConfig, TrainSection
from liver_hpc.errors import ConfigError
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.candidates import (
    KEPT,
    PRIOR,
    Candidates,
    expected_order,
    layouts_to_derive,
    resolve_layouts,
    step_terms,
    workers_of_a_node,
)
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.memory import fullest_worker, worker_bytes
from liver_hpc.layout.ownership import PARAMETER_ALIGNMENT
from liver_hpc.layout.policy import MARGIN, REMEMBERED_STEPS, LayoutPolicy
from liver_hpc.layout.tensors import ModelSpec, TensorSpec
from liver_hpc.recipes.base import BuildContext, NoOptions, Recipe
from tests.unit.config.runs import minimal
from tests.unit.layout.models import LAYOUTS, MODELS, TIED
from tests.unit.layout.test_overlap import EXPERTS

DP1, DP2, DP4 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 4)
TP2, TP4, PP2, PP4 = Layout(2, 1, 1), Layout(4, 1, 1), Layout(1, 2, 1), Layout(1, 4, 1)
TP2_DP2, PP2_DP2, TP2_PP2 = Layout(2, 1, 2), Layout(1, 2, 2), Layout(2, 2, 1)


def check_layout(layout: Layout) -> None:
    """As TIED's recipe would: four layers and heads."""
    if 4 % layout.tp:
        raise ConfigError(f"tp={layout.tp} does not divide 4 heads")
    TIED.check_layout(layout)


def fullest_bytes(model: ModelSpec, layout: Layout) -> int:
    return sum(fullest_worker(model, layout).values())


def auto(**sections: Any) -> RunConfig:
    return minimal(layouts="auto", **sections)


def resolved(**sections: Any) -> dict[int, list[Layout]]:
    config = resolve_layouts(auto(**sections), TIED, check_layout)
    return {count: config.allowed_layouts(count) for count in config.worker_counts}


# ---- which layouts a run can take


def test_every_layout_that_divides_the_fastest_expected_first() -> None:
    assert resolved() == {
        1: [DP1],
        2: [DP2, PP2, TP2],
        3: [Layout(1, 1, 3), Layout(1, 3, 1)],
        4: [DP4, PP2_DP2, TP2_DP2, PP4, TP2_PP2, TP4],
    }


def test_the_resolved_run_chooses_by_itself() -> None:
    config = resolve_layouts(auto(), TIED, check_layout)
    assert config.policy.layout == "auto"
    assert RunConfig.model_validate(config.model_dump()) == config


def test_a_table_stays_as_it_is() -> None:
    config = minimal()
    assert resolve_layouts(config, TIED, check_layout) is config


def test_a_pipeline_without_micro_batches_to_fill_it_comes_late() -> None:
    train = TrainSection(steps=1, global_batch=2, micro_batch=2)
    assert sorted([PP2, TP2], key=lambda entry: expected_order(entry, train)) == [TP2, PP2]


@given(LAYOUTS, st.integers(1, 64))
def test_terms_are_shares_of_one_workers_step(layout: Layout, multiple: int) -> None:
    train = TrainSection(steps=1, global_batch=multiple * layout.dp)
    terms = step_terms(layout, train)
    assert all(term >= 0 for term in terms)
    assert terms.compute >= 1 / layout.workers
    assert step_terms(DP1, train) == (1, 0, 0, 1, 0, 0)


@settings(max_examples=20, deadline=None)
@given(LAYOUTS, st.sampled_from(MODELS))
def test_nobody_holds_more_than_the_fullest_but_for_padding(
    layout: Layout, model: ModelSpec
) -> None:
    held = [sum(worker_bytes(model, layout, at).values()) for at in layout.coordinates()]
    padding_bytes = len(model.tensors) * PARAMETER_ALIGNMENT * 12
    assert 0 <= max(held) - fullest_bytes(model, layout) < padding_bytes


def test_memory_leaves_out_what_is_too_large() -> None:
    staging = minimal().handoff.staging_bytes
    least, most = fullest_bytes(TIED, TP4), fullest_bytes(TIED, DP1)
    assert least < most
    table = resolved(policy={"memory_bytes": staging + fullest_bytes(TIED, TP2)})
    assert table[2] == [TP2]
    assert 1 not in table
    with pytest.raises(ConfigError) as raised:
        resolved(policy={"memory_bytes": staging + 1})
    assert "workers.initial = 2 (worker counts with a layout: none)" in str(raised.value)
    wanted = f"holds {fullest_bytes(TIED, DP2)} bytes and {staging} for staging, more than"
    assert wanted in str(raised.value)


def test_no_layout_for_the_first_workers_says_why() -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(workers={"initial": 5, "max": 5}, train={"steps": 1, "global_batch": 2})
    assert str(raised.value) == (
        "layouts: auto finds nothing for workers.initial = 5 (worker counts with a layout: "
        "1, 2, 4): tp5 pp1 dp1: tp=5 does not divide 4 heads; "
        "tp1 pp1 dp5: 2 micro-batches in the global batch are too few for dp=5; "
        "tp1 pp5 dp1: pp5: the model's spec has pp1, pp2, "
        "pp2 vpp2, pp3, pp4 only"
    )


def test_tensor_parallelism_stays_on_a_node() -> None:
    burst = {"partition": "preempt", "max_nodes": 2, "workers_per_node": 2}
    slurm = {"components": [{"name": "main", "gpus_per_node": 4}], "burst": burst}
    config = auto(cluster={"kind": "slurm", "slurm": slurm})
    assert workers_of_a_node(config) == 2
    fault = Candidates(config, TIED, check_layout).fault(TP4)
    assert fault == "tp=4 is more than the 2 workers of a node"
    assert workers_of_a_node(auto(cluster={"kind": "slurm"})) is None
    assert workers_of_a_node(auto(cluster={"kind": "slurm", "workers_per_node": 3})) == 3
    assert workers_of_a_node(auto(cluster={"kind": "local", "workers_per_node": 1})) is None


def test_axes_that_the_recipe_does_not_know() -> None:
    copied = ModelSpec((TensorSpec("weight", (4, 4)),), {"pp1": (((0,),),)}, parameter_bytes=4)

    class Parts(Recipe):
        def build(self, context: BuildContext) -> Any:
            raise NotImplementedError

        def batch(self, step: int) -> Any:
            raise NotImplementedError

        def loss(self, model: Any, samples: Any) -> Any:
            raise NotImplementedError

    recipe = Parts(NoOptions(), auto())
    recipe.spec = copied
    with pytest.raises(ConfigError, match="Parts gives no hidden_shape, so it allows pp=1 only"):
        recipe.check_layout(PP2)
    candidates = Candidates(auto(), recipe.spec, recipe.check_layout)
    assert candidates.table() == {count: [Layout(1, 1, count)] for count in (1, 2, 3, 4)}
    assert candidates.fault(TP2) == "no tensor of the model is split over tp"


def test_losing_one_of_eight_workers_keeps_seven() -> None:
    sizes = {"train": {"steps": 1, "global_batch": 128}, "workers": {"initial": 8, "max": 8}}
    table = resolved(**sizes)
    assert table[7] == [Layout(1, 1, 7)]
    config = resolve_layouts(auto(**sizes), TIED, check_layout)
    assert LayoutPolicy(config, TIED).best(7) == Layout(1, 1, 7)


def test_the_rank_with_most_micro_batches_decides() -> None:
    """Of 8 micro-batches one of 7 ranks has two, as each of 4 has; of 9 ranks none."""
    train = TrainSection(steps=1, global_batch=8)
    computing = [step_terms(Layout(1, 1, dp), train).compute for dp in (4, 7, 8)]
    assert computing == [2 / 8, 2 / 8, 1 / 8]


def test_what_the_other_axes_cost_and_save() -> None:
    train = TrainSection(steps=1, global_batch=16)
    plain, interleaved = Layout(1, 4, 2), Layout(1, 4, 2, vpp=2)
    bubble = 1 + 3 / 8
    assert step_terms(plain, train).compute == pytest.approx(bubble / 8)
    assert step_terms(interleaved, train).compute == pytest.approx((1 + 3 / 2 / 8) / 8)
    context, data = step_terms(Layout(1, 1, 1, cp=2), train), step_terms(DP2, train)
    assert context.compute == data.compute
    assert context.context > 0 == data.context
    experts = step_terms(Layout(1, 1, 4, ep=4), train)
    assert experts.experts == pytest.approx(3 / 4 / 4)
    assert experts[:5] == step_terms(DP4, train)[:5]


def test_experts_are_shared_where_the_model_has_any_and_with_tp_the_sequence_too() -> None:
    config = resolve_layouts(auto(), EXPERTS, EXPERTS.check_layout)
    listed = {str(layout) for layout in config.layouts_listed}
    assert {"tp1 pp1 dp4", "tp1 pp1 dp4 ep2", "tp1 pp1 dp4 ep4", "tp2 pp1 dp2 ep2 sp"} <= listed
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in config.layouts_listed)


def test_experts_are_shared_by_as_many_as_their_memory_wants() -> None:
    layout = Layout(1, 1, 4, ep=4)
    most = fullest_bytes(EXPERTS, layout) + minimal().handoff.staging_bytes
    config = auto(policy={"memory_bytes": most}, workers={"initial": 4, "max": 4})
    table = resolve_layouts(config, EXPERTS, EXPERTS.check_layout).layout_table
    assert table[4][0].layout() == layout


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, st.sampled_from([*MODELS, EXPERTS]), st.sampled_from([1, 2, 4]))
def test_memory_is_counted_alike_for_one_layout_and_many(
    layout: Layout, model: ModelSpec, ep: int
) -> None:
    if model is EXPERTS:
        layout = Layout(min(layout.tp, 2), 1, layout.dp * ep, ep=ep)
    most = fullest_bytes(model, layout)
    staging = minimal().handoff.staging_bytes
    assert not Budget(minimal(policy={"memory_bytes": most + staging}), model).layout_fault(layout)
    short = Budget(minimal(policy={"memory_bytes": most + staging - 1}), model)
    fault = short.layout_fault(layout)
    assert fault.startswith(f"its fullest worker holds {most} bytes and")


def test_what_is_derived_for_auto() -> None:
    config = auto(
        workers={"initial": 4, "max": 16}, cluster={"kind": "slurm", "workers_per_node": 2}
    )
    dense = layouts_to_derive(config, layers=10, experts=0)
    assert {(one.tp, one.ep, one.sequence_parallel) for one in dense} == {
        (1, 1, False),
        (2, 1, False),
    }
    # Ten layers: 10, 5, 4, 3, 2, 1 on the longest stage.
    assert sorted({one.pp for one in dense}) == [1, 2, 3, 4, 5, 10]
    experts = layouts_to_derive(config, layers=1, experts=6)
    assert {(one.tp, one.dp, one.ep) for one in experts} == {
        (tp, ep, ep) for tp in (1, 2) for ep in (1, 2, 3, 6)
    }
    assert all(one.sequence_parallel == (one.tp == 2) for one in experts)
    assert dense == [one.least for one in dense]


def test_a_thousand_workers_take_no_time() -> None:
    config = auto(train={"steps": 1, "global_batch": 1024}, workers={"initial": 1, "max": 1024})
    began_s = time.process_time()
    table = resolve_layouts(config, TIED, check_layout).layout_table
    assert time.process_time() - began_s < 5.0  # tenths of a second, on a machine at rest
    assert max(table) == 1024
    assert max(map(len, table.values())) == KEPT
    best = [step_terms(entries[0].layout(), config.train).cost(PRIOR) for entries in table.values()]
    assert all(later < sooner for sooner, later in itertools.pairwise(best))


def test_whole_nodes_and_what_notices_name_stay_in_the_table() -> None:
    config = auto(
        train={"steps": 10, "global_batch": 64},
        workers={"initial": 64, "max": 64},
        notices=[{"at_step": 1, "layout": {"pp": 4, "dp": 13}}, {"at_step": 2, "workers": 63}],
        cluster={"kind": "slurm", "workers_per_node": 8},
    )
    table = resolve_layouts(config, TIED, check_layout).layout_table
    assert {8, 16, 24, 32, 40, 48, 52, 56, 63, 64} <= {*table}
    assert 62 not in table  # no faster than fewer, whose ranks have as many micro-batches
    assert Layout(1, 4, 13) in [entry.layout() for entry in table[52]]
    shapes = Candidates(config, TIED, check_layout)._shapes()
    assert {tp for tp, _, _ in shapes} == {1, 2, 4, 8}, "a group lies on one node"
    here = auto(workers={"initial": 6, "max": 6}, cluster={"kind": "local"})
    shapes = Candidates(here, TIED, check_layout)._shapes()
    assert {tp for tp, _, _ in shapes} == {*range(1, 7)}


# ---- which one is run


def policy(kind: str = "auto", **sections: Any) -> LayoutPolicy:
    table = {2: [{"tp": 2}, {"dp": 2}, {"pp": 2}], 1: [{}], 4: [{"tp": 4}, {"dp": 4}]}
    config = minimal(layouts=table, policy={"layout": kind}, **sections)
    return LayoutPolicy(config, TIED)


def taught(**times: float) -> LayoutPolicy:
    """A policy that has seen layouts: `tp2=0.5`."""
    chooser = policy()
    for name, step_s in times.items():
        chooser.observe(Layout.parse(name), step_s)
    return chooser


def test_table_order() -> None:
    chooser = policy("table")
    chooser.observe(DP2, 0.001)
    assert chooser.choices(5) == [TP4, DP4, TP2, DP2, PP2, DP1]
    assert chooser.best(4) == TP4
    assert chooser.best(3) == TP2
    assert chooser.best(1) == DP1
    assert chooser.best(0) is None


def test_counts_above_the_most_are_not_taken() -> None:
    table = {2: [{"dp": 2}], 8: [{"dp": 8}]}
    for kind in ("table", "auto"):
        config = minimal(layouts=table, policy={"layout": kind})
        assert LayoutPolicy(config, TIED).best(8) == DP2


def test_what_does_not_fit_the_memory_is_never_chosen() -> None:
    staging = minimal().handoff.staging_bytes
    most = staging + fullest_bytes(TIED, TP2)
    config = minimal(policy={"layout": "auto", "memory_bytes": most})
    assert LayoutPolicy(config, TIED).choices(2) == [TP2]


def test_nothing_measured_goes_by_expectation() -> None:
    assert policy().choices(4) == [DP4, TP4, DP2, PP2, TP2, DP1]


def test_measured_beats_expected() -> None:
    assert taught(dp2=1.0, tp2=0.9).choices(2)[0] == TP2
    assert taught(dp2=1.0, tp2=0.9, pp2=1.1, dp1=0.8).best(2) == DP1


def test_median_of_the_last_steps() -> None:
    chooser = taught(tp2=0.9)
    for _ in range(REMEMBERED_STEPS):
        chooser.observe(DP2, 9.0)
    assert chooser.best(2) == TP2
    for _ in range(REMEMBERED_STEPS // 2 + 1):
        chooser.observe(DP2, 0.8)
    assert chooser.best(2) == DP2
    for _ in range(REMEMBERED_STEPS // 2 - 2):
        chooser.observe(DP2, 99.0)
    assert chooser.best(2) == DP2


def test_what_is_forgotten_is_expected_anew() -> None:
    chooser = taught(dp4=9.0, dp2=1.9)
    assert chooser.best(4) == DP2
    chooser.forget(DP4)
    assert chooser.best(4) == DP4
    chooser.forget(DP4)
    assert chooser.best(4) == DP4


@pytest.mark.parametrize("nothing", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_no_time_is_dropped(nothing: float) -> None:
    assert taught(dp2=nothing).choices(4) == policy().choices(4)


def test_one_measured_layout_scales_the_expectation() -> None:
    chooser, fresh = taught(dp2=3.0), policy()
    scale = 3.0 / fresh.expected_step_s(DP2)
    for layout in (DP1, TP2, PP2, DP4, TP4):
        assert chooser.expected_step_s(layout) == pytest.approx(
            scale * fresh.expected_step_s(layout)
        )


def test_measurements_show_what_communication_costs() -> None:
    cheap = taught(dp1=1.0, tp2=0.5).expected_step_s(TP4)
    dear = taught(dp1=1.0, tp2=0.9).expected_step_s(TP4)
    assert cheap < policy().expected_step_s(TP4) / policy().expected_step_s(DP1) < dear


@pytest.mark.parametrize(("global_batch", "expected"), [(64, PP2), (8, DP2)])
def test_an_unseen_layout_needs_a_margin(global_batch: int, expected: Layout) -> None:
    """Only pp2 was trained; the fewer micro-batches, the better is dp2 beside it."""
    chooser = policy(train={"steps": 10, "global_batch": global_batch})
    chooser.observe(PP2, 1.0)
    gain = 1 - chooser.expected_step_s(DP2)
    assert gain > 0
    assert (gain > MARGIN) == (expected == DP2)
    assert chooser.best(2) == expected


# ---- what a change has to repay


@pytest.mark.parametrize(
    ("lasting_s", "cost_s", "said"),
    [
        (100.0, 49.0, ""),
        (100.0, 50.0, "it saves 50.0 s in the next 100 s, and costs 50.0 s"),
        (0.0, 1.0, "it saves nothing in the next 0 s, and costs 1.0 s"),
        (1800.0, 3.0, ""),
    ],
)
def test_a_change_has_to_repay_what_it_costs(lasting_s: float, cost_s: float, said: str) -> None:
    assert taught(dp2=1.0, dp4=0.5).not_worth(DP2, DP4, cost_s, lasting_s) == said


def test_a_slower_layout_repays_nothing() -> None:
    said = taught(dp2=1.0, dp4=1.5).not_worth(DP2, DP4, 0.1, 1800.0)
    assert said == "it saves nothing in the next 1800 s, and costs 0.1 s"


def test_by_the_table_more_workers_are_always_wanted() -> None:
    assert policy("table").not_worth(DP2, DP4, 1e9, 1.0) == ""


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.0, 1e3), st.floats(0.0, 1e4))
def test_what_repays_does_more_steps(
    source_s: float, target_s: float, cost_s: float, lasting_s: float
) -> None:
    """In the time that the target lasts, less what the change costs."""
    worth = not taught(dp2=source_s, dp4=target_s).not_worth(DP2, DP4, cost_s, lasting_s)
    gain = (lasting_s - cost_s) / target_s - lasting_s / source_s
    assert worth == (gain > 0) or gain == pytest.approx(0, abs=1e-6 * (1 + lasting_s / source_s))


TIMES = st.dictionaries(
    st.sampled_from([DP1, DP2, TP2, PP2, DP4, TP4]), st.floats(1e-3, 1e3), min_size=1
)


@given(TIMES, st.integers(1, 4))
def test_what_the_choice_promises(times: dict[Layout, float], workers: int) -> None:
    chooser, again = policy(), policy()
    for layout, step_s in times.items():
        chooser.observe(layout, step_s)
        again.observe(layout, step_s)
    choices = chooser.choices(workers)
    assert choices == again.choices(workers)
    assert sorted(choices) == sorted(policy("table").choices(workers))
    best, expected = choices[0], chooser.expected_step_s(choices[0])
    for other in choices[1:]:
        other_s = chooser.expected_step_s(other)
        if best not in times and other in times:
            assert expected <= (1 - MARGIN) * other_s * 1.0000001
        elif (best in times) == (other in times) and best.workers == other.workers:
            assert expected <= other_s
        if best not in times and best.workers < other.workers == max(c.workers for c in choices):
            assert expected <= (1 - MARGIN) * other_s * 1.0000001


@given(TIMES)
@example({DP2: 1.0, DP1: 241.0, TP2: 233.0, DP4: 4.0})
def test_predictions_are_times(times: dict[Layout, float]) -> None:
    chooser = policy()
    for layout, step_s in times.items():
        chooser.observe(layout, step_s)
    for layout in (DP1, DP2, TP2, PP2, DP4, TP4):
        assert 0 < chooser.expected_step_s(layout) < 1e6


def test_the_prior_ranks_dp_pp_tp() -> None:
    assert 0 < PRIOR.data < 1
    train = TrainSection(steps=1, global_batch=64)
    order = sorted([TP2, PP2, DP2], key=lambda entry: expected_order(entry, train))
    assert order == [DP2, PP2, TP2]


def ramped(layouts: dict[int, Any]) -> LayoutPolicy:
    """Batches of 8 up to step 9, then of 16, 24 and 32."""
    ramp = {"start": 8, "increment": 8, "samples": 240}
    train = {"steps": 100, "global_batch": 32, "rampup": ramp}
    config = minimal(train=train, layouts=layouts, policy={"layout": "auto"})
    return LayoutPolicy(config, TIED)


def test_a_larger_batch_is_not_taken_for_a_slower_layout() -> None:
    """Of two layouts that are alike, the one that was measured with the smaller batch is not the
    better one."""
    chooser = ramped({2: [{"dp": 2}, {"tp": 2}]})
    chooser.observe(TP2, 1.0, batch=8)
    small_s = chooser.expected_step_s(TP2)
    chooser.at_step(99)
    assert chooser.expected_step_s(TP2) == pytest.approx(4 * small_s, rel=0.1)
    chooser.observe(DP2, 3.0, batch=32)
    assert chooser.best(2) == DP2
    chooser.observe(TP2, 3.9, batch=32)
    assert chooser.expected_step_s(TP2) == 3.9
    chooser.at_step(0)
    assert chooser.expected_step_s(TP2) == 1.0
    assert chooser.expected_step_s(DP2) == pytest.approx(3 / 4, rel=0.1)
    assert chooser.best(2) == DP2


def test_the_work_of_a_smaller_batch_is_told_in_that_of_the_whole() -> None:
    """dp6 computes 8 samples in two turns, as long as dp4 does; what a step costs is the same."""
    train = ramped({2: [{"dp": 2}]})._train
    whole = step_terms(Layout(1, 1, 8), train)
    small = step_terms(Layout(1, 1, 8), train, batch=8)
    assert whole.compute == pytest.approx(4 * small.compute)
    assert (whole.fixed, whole.data) == (small.fixed, small.data)
    assert step_terms(Layout(1, 1, 6), train, batch=8).compute == pytest.approx(2 * small.compute)
