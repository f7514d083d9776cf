"""What a worker holds during a handoff, and which layouts fit in pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.budget import Budget, HandoffMemory
from liver_hpc.layout.candidates import Candidates, resolve_layouts
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import worker_bytes
from liver_hpc.layout.ownership import PARAMETER_ALIGNMENT
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


@settings(max_examples=25, deadline=None)
@given(st.lists(LAYOUTS, min_size=1, max_size=5, unique=True), st.floats(0.5, 2.5))
def test_a_fault_counts_the_pairs_that_do_not_fit(layouts: list[Layout], times: float) -> None:
    most = STAGING + int(times * max(map(budget().held, layouts)))
    pairs = list(itertools.product(layouts, repeat=2))
    large = [pair for pair in pairs if wanted(*pair) > most]
    fault = budget(most).change_fault(layouts)
    if not large:
        assert fault == ""
        return
    change = budget(most).fullest_change(layouts)
    assert wanted(change.source, change.target) == max(itertools.starmap(wanted, pairs))
    assert fault.startswith(f"{change}: a worker that stays holds ")
    assert f"with {len(large)} of the {len(pairs)} changes" in fault


def test_a_fault_says_what_is_held_of_what() -> None:
    most = wanted(DP2, PP2)
    assert budget(most).change_fault([PP2, TP2]) == ""
    assert budget(most - 1).change_fault([DP2]) == (
        f"replacing a worker of tp1 pp1 dp2: a worker that stays holds {budget().held(DP2)} bytes "
        f"of the source world and {budget().held(DP2)} of the target world, {STAGING} for staging "
        f"and 1000 in the rehearsal: {wanted(DP2, DP2)} during the handoff, more than "
        f"policy.memory_bytes {most - 1}; so it is with 1 of the 1 changes and replacements among "
        "the run's layouts"
    )
    assert budget(None).change_fault([DP2]) == ""


def test_without_a_rehearsal_it_takes_nothing() -> None:
    assert budget(warm_up=False).fullest_change([PP2]).held.rehearsal == 0
    unknown = Budget(minimal(), TIED)
    assert unknown.fullest_change([PP2]).held == (budget().held(PP2),) * 2 + (STAGING, 0)


# ---- layouts: auto


def auto(most: int) -> RunConfig:
    return minimal(layouts="auto", policy={"memory_bytes": most})


def listed(most: int) -> set[Layout]:
    config = resolve_layouts(auto(most), TIED, TIED.check_layout, rehearsal_bytes)
    return set(config.layouts_listed)


def test_any_two_of_the_layouts_of_auto_fit_together() -> None:
    most = wanted(TP2, TP2)
    found = listed(most)
    assert {TP2, TP4} <= found
    assert DP2 not in found
    assert max(wanted(*pair) for pair in itertools.product(found, repeat=2)) <= most
    assert budget(most).change_fault(sorted(found)) == ""
    assert TP2 in listed(most + 10**9)
    assert DP2 in listed(most + 10**9)


def test_a_layout_that_fits_alone_but_not_in_pairs_is_named() -> None:
    most = budget().held(DP2) + STAGING + 5000
    candidates = Candidates(auto(most), TIED, TIED.check_layout, rehearsal_bytes)
    assert candidates.fault(DP2).startswith("replacing a worker of tp1 pp1 dp2: a worker that")


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_layouts_stay(seed: int) -> None:
    """The largest set of smallest ones among which every change fits."""
    draw = np.random.default_rng(seed)
    held, rehearsal = draw.integers(1, 50, (2, 8)).astype(np.float64)
    most = int(draw.integers(10, 130))
    one = budget(most + STAGING)
    order = np.argsort(held, kind="stable")

    def fits(count: int) -> bool:
        chosen = order[:count]
        return not count or held[chosen].max() + (held + rehearsal)[chosen].max() <= most

    count = max(count for count in range(9) if fits(count))
    assert set(np.flatnonzero(one.together(held, rehearsal))) == set(order[:count])
