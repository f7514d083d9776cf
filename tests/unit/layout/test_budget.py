"""What a worker holds during a handoff, and which layouts fit in pairs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from liver_hpc.layout.budget import Budget, HandoffMemory, loads
from liver_hpc.layout.candidates import resolve_layouts
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import stage_parts, worker_bytes
from liver_hpc.layout.ownership import PARAMETER_ALIGNMENT
from liver_hpc.layout.tensors import ModelSpec
from tests.unit.config.runs import minimal
from tests.unit.layout.models import LAYOUTS, TIED

STAGING = minimal().handoff.staging_bytes
DP2, TP2, PP2, TP4 = (Layout.parse(text) for text in ("dp2", "tp2", "pp2", "tp4"))
PADDING_BYTES = 2 * len(TIED.tensors) * PARAMETER_ALIGNMENT * 12


def rehearsal_bytes(layout: Layout) -> int:
    """Deeper pipelines hold more, to be different from what the state wants."""
    return 1000 * layout.pp


def budget(most: int | None = None, **handoff: object) -> Budget:
    config = minimal(policy={"memory_bytes": most}, handoff=handoff)
    return Budget(config, TIED, rehearsal_bytes)


def wanted(source: Layout, target: Layout) -> int:
    """Of the fullest worker, whoever sits where."""
    one = budget()
    return one.held(source) + one.held(target) + STAGING + rehearsal_bytes(target)


def placed(layout: Layout, first: int) -> RankMap:
    return RankMap(layout, tuple(range(first, first + layout.workers)))


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 3))
def test_the_fullest_of_a_handoff_is_the_fullest_of_its_workers(
    source: Layout, target: Layout, first: int
) -> None:
    """Workers before `first` leave; those behind the source's join."""
    before, after = placed(source, 0), placed(target, first)
    held = []
    for worker in {*before.workers, *after.workers}:
        at, to = before.coordinate_of(worker), after.coordinate_of(worker)
        seats = [(source, at)] * (at is not None) + [(target, to)] * (to is not None)
        state = sum(sum(worker_bytes(TIED, one, seat).values()) for one, seat in seats if seat)
        held.append(state + STAGING + (rehearsal_bytes(target) if to is not None else 0))
    most = budget().fullest_worker_of(before, after)
    assert 0 <= max(held) - most.together + PADDING_BYTES <= 2 * PADDING_BYTES
    assert most.together <= wanted(source, target) + PADDING_BYTES


def test_who_leaves_and_who_joins_holds_one_world() -> None:
    source, target = RankMap(DP2, (0, 1)), RankMap(TP2, (2, 3))
    most = budget().fullest_worker_of(source, target)
    assert most == HandoffMemory(budget().held(DP2), 0, STAGING, 0)
    assert budget().fullest_worker_of(source, RankMap(TP2, (0, 2))) == HandoffMemory(
        budget().held(DP2), budget().held(TP2), STAGING, 1000
    )


def parts(model: ModelSpec, layout: Layout) -> NDArray[np.float64]:
    """Parameters, gradients, and optimizer state of each kind of stage."""
    return stage_parts(model, layout, np.array([layout.replicas]))[:, :, 0]


def bounded_bytes(source: Layout, target: Layout, model: ModelSpec = TIED) -> float:
    """As one kind of two after the other changes over, the gradients gone, on whatever stages."""
    (p, g, s), (p_, g_, s_) = parts(model, source), parts(model, target)
    changing = [(p_, p + s), (p_ + s_ / 2, s), (p_ + s_, s / 2)]
    peaks = [float(begun.max() + left.max()) for begun, left in changing]
    return STAGING + max(float((p + g + s).max()), *peaks, float((p_ + g_ + s_).max()))


def test_a_stage_on_which_little_is_trained_is_held_twice_in_bounded_memory() -> None:
    """It is not the fullest one, but its parameters are, and no gradients make room for them."""
    trained = replace(TIED.tensors[0], name="b", tied=False)
    frozen = replace(trained, name="a", role="frozen", shape=(4 * trained.rows, trained.cols))
    stages = {"pp1": (((0, 1),),), "pp2": (((0,),), ((1,),))}
    model = replace(TIED, tensors=(frozen, trained), stages=stages)
    source, target = Layout(1, 2, 2), Layout(1, 2, 1)
    held = parts(model, target)
    assert held.sum(axis=0).argmax() != held[0].argmax()
    peak = Budget(minimal(), model).bounded_bytes(source, target)
    assert peak == pytest.approx(bounded_bytes(source, target, model), abs=1)
    assert peak >= 2 * held[0].max() + STAGING


@settings(max_examples=25, deadline=None)
@given(st.lists(LAYOUTS, min_size=1, max_size=5, unique=True))
def test_bounded_memory_takes_one_world_and_one_kind_of_state_in_the_place_of_gradients(
    layouts: list[Layout],
) -> None:
    pairs = list(itertools.product(layouts, repeat=2))
    peak, source, target = budget().fullest_bounded_change(layouts)
    assert peak == pytest.approx(max(itertools.starmap(bounded_bytes, pairs)), abs=1)
    assert peak == pytest.approx(bounded_bytes(source, target), abs=1)
    assert peak <= max(itertools.starmap(wanted, pairs))
    (alone, *_) = budget().fullest_bounded_change(layouts[:1])
    # A worker replaced, on stages alike: the room is equal.
    assert alone >= budget().held(layouts[0]) + STAGING
    if parts(TIED, layouts[0]).shape[1] == 1:
        assert alone == budget().held(layouts[0]) + STAGING


@settings(max_examples=25, deadline=None)
@given(LAYOUTS, LAYOUTS, st.floats(0.5, 2.5))
def test_both_worlds_are_held_where_they_fit(source: Layout, target: Layout, times: float) -> None:
    most = STAGING + int(times * budget().held(source))
    why = budget(most).bounded_because(source, target)
    assert bool(why) == (wanted(source, target) > most)
    if why:
        assert why == (
            f"both worlds would take {wanted(source, target)} bytes of a worker, "
            f"policy.memory_bytes is {most}"
        )
    assert budget(memory="bounded").bounded_because(source, target)
    assert budget(None).bounded_because(source, target) == ""


def test_a_change_for_which_there_is_no_memory_is_named() -> None:
    peak, source, target = budget().fullest_bounded_change([DP2, PP2, TP2])
    assert budget(peak).change_fault([DP2, PP2, TP2]) == ""
    assert budget(peak - 1).change_fault([DP2, PP2, TP2]) == (
        f"replacing a worker of tp1 pp1 dp2: a worker that stays holds up to {peak} bytes, "
        f"{STAGING} of them for staging, also where memory is bounded, more than "
        f"policy.memory_bytes {peak - 1}"
    )
    assert (source, target) == (DP2, DP2)
    assert budget(None).change_fault([DP2]) == ""


def test_one_change_in_bounded_memory_takes_as_much_as_the_larger_world_or_what_is_between() -> (
    None
):
    one = budget()
    both = [one.bounded_bytes(*ends) for ends in itertools.product([DP2, PP2], repeat=2)]
    assert max(both) == one.fullest_bounded_change([DP2, PP2])[0]
    for ends in itertools.product([DP2, PP2, TP2], repeat=2):
        assert one.bounded_bytes(*ends) >= max(map(one.held, ends)) + STAGING
        assert one.bounded_bytes(*ends) < sum(map(one.held, ends)) + STAGING


def test_without_a_rehearsal_it_takes_nothing() -> None:
    assert budget(warm_up=False).fullest_change([PP2]).held.rehearsal == 0
    unknown = Budget(minimal(), TIED)
    assert unknown.fullest_change([PP2]).held == (budget().held(PP2),) * 2 + (STAGING, 0)


# ---- layouts: auto


def listed(most: int) -> set[Layout]:
    config = minimal(layouts="auto", policy={"memory_bytes": most})
    return set(resolve_layouts(config, TIED, TIED.check_layout).layouts_listed)


def test_any_two_of_the_layouts_of_auto_fit_in_bounded_memory() -> None:
    most = budget().held(TP2) + STAGING
    found = listed(most)
    assert {TP2, TP4} <= found
    assert DP2 not in found
    assert budget(most).change_fault(sorted(found)) == ""
    assert DP2 in listed(most + 10**9)


@pytest.mark.parametrize("seed", range(20))
def test_each_layout_stays_that_fits_with_all_before_it(seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = draw.integers(1, 50, (3, 3, 8)).astype(np.float64)
    most = int(draw.integers(60, 160))

    def peak(source: int, target: int) -> float:
        (p, g, o), (p_, g_, o_) = parts[:, :, source], parts[:, :, target]
        between = ((p + o, p_), (o, p_ + o_ / 2), (o / 2, p_ + o_))
        peaks = (left.max() + begun.max() for left, begun in between)
        return float(max((p + g + o).max(), *peaks, (p_ + g_ + o_).max()))

    stay: list[int] = []
    for layout in range(8):
        pairs = itertools.product([*stay, layout], repeat=2)
        if all(peak(*pair) <= most for pair in pairs):
            stay.append(layout)
    together = budget(most + STAGING).together(loads(parts, 2))
    assert np.flatnonzero(together).tolist() == stay
