from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.run.salvage import Salvage, difference, newest
from tests.unit.layout.models import LAYOUTS
from tests.unit.run.outside import snapshots_held

Held = dict[int, tuple[m.HeldSnapshot, ...]]


def both(*held: Held) -> Held:
    """What workers hold of several boundaries."""
    workers = {worker for each in held for worker in each}
    return {w: tuple(s for each in held for s in each.get(w, ())) for w in workers}


def without(held: Held, lost: Iterable[int]) -> Held:
    return {worker: each for worker, each in held.items() if worker not in set(lost)}


@settings(max_examples=60, deadline=None)
@given(LAYOUTS.filter(lambda layout: layout.workers > 1), st.data())
def test_whichever_node_is_lost_the_newest_boundary_is_left_whole(
    layout: Layout, data: st.DataObject
) -> None:
    slots = data.draw(st.integers(1, layout.workers - 1))
    nodes = tuple(worker // slots for worker in range(layout.workers))
    world = RankMap(layout, tuple(range(layout.workers)), nodes)
    node = data.draw(st.sampled_from(sorted(set(nodes))))
    lost = [worker for worker in world.workers if nodes[worker] == node]
    held = without(both(snapshots_held(world, 3, 6), snapshots_held(world, 3, 7)), lost)
    found = newest(held)
    assert found is not None
    assert (found.generation, found.layout, found.scalars.step) == (3, layout, 7)
    assert not {*found.holders} & {*lost}
    for rank, holder in enumerate(found.holders):
        assert any(each.rank == rank and each.scalars.step == 7 for each in held[holder])
    assert found.digests == {"parameter": 7}


WORLD = RankMap(Layout(1, 1, 3), (10, 11, 12), (0, 1, 2))


def test_an_older_boundary_is_gone_back_to_where_the_newer_one_is_not_whole() -> None:
    newer = without(snapshots_held(WORLD, 1, 9), [12])  # that of rank 2 is on its way to 10 still
    newer[10] = tuple(each for each in newer[10] if each.rank != 2)
    found = newest(without(both(snapshots_held(WORLD, 1, 8), newer), [12]))
    assert found is not None
    assert found.scalars.step == 8


def test_nothing_is_left_where_a_share_and_its_copy_are_lost() -> None:
    assert newest(without(snapshots_held(WORLD, 1, 9), [10, 11])) is None
    assert newest({}) is None


def test_shares_of_two_worlds_are_not_mixed() -> None:
    """A world of the same layout at the same step, before and after a handoff."""
    before, after = snapshots_held(WORLD, 1, 9), snapshots_held(WORLD, 2, 9)
    assert newest({10: before[10][:1], 11: after[11]}) is None
    found = newest(both(before, after))
    assert found is not None
    assert found.generation == 2


def test_one_that_gives_nothing_yet_goes_first() -> None:
    found = newest(without(snapshots_held(WORLD, 1, 9), [10]))
    assert found is not None
    assert sorted(found.holders) == [11, 11, 12] or sorted(found.holders) == [11, 12, 12]


def refilled(worker: int, step: int = 9, value: str = "f", share: int = 0) -> m.Refilled:
    digest = m.ClassDigest(kind="parameter", tp_replicated=True, multi_stage=True, value=value)
    return m.Refilled(
        worker=worker,
        generation=4,
        scalars=m.ScalarState(
            step=step, consumed_samples=8 * step, optimizer_step=step, loss_scale=1.0, seed=1234
        ),
        digests=(digest,),
        shares={"parameter": f"{share:016x}"},
    )


@pytest.mark.parametrize(
    ("second", "wanted"),
    [
        (refilled(11, share=7), ""),
        (refilled(11, step=8, share=7), "worker 11 is at step=8"),
        (refilled(11, value="e", share=7), "parameter"),
        (
            refilled(11, share=6),
            "the snapshots were 0000000000000007, the world is 0000000000000006",
        ),
    ],
)
def test_a_world_is_held_against_what_it_was_filled_with(second: m.Refilled, wanted: str) -> None:
    salvage: Salvage | None = newest(snapshots_held(WORLD, 1, 9))
    assert salvage is not None
    target = RankMap(Layout(1, 1, 2), (10, 11))
    found = difference(salvage, target, {10: refilled(10), 11: second})
    assert wanted in found
    assert bool(found) == bool(wanted)
