"""Every micro-batch of a global batch counts once and alike, whatever the layout."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from liver_hpc.config.schema import TrainSection
from liver_hpc.layout.batch import batch_fault, most_micro_batches, share_of
from liver_hpc.layout.coordinates import Layout

AXES = st.integers(1, 6)


def micro_batches(train: TrainSection) -> int:
    return train.global_batch // train.micro_batch


@st.composite
def cases(draw: st.DrawFn) -> tuple[TrainSection, Layout]:
    """A batch and a layout that can share it: dp need not divide the batch, nor ep cp."""
    dp, cp = draw(AXES), draw(AXES)
    ep = draw(st.sampled_from([size for size in range(1, dp * cp + 1) if dp * cp % size == 0]))
    micro_batch = draw(st.integers(1, 3))
    global_batch = micro_batch * draw(st.integers(dp, 4 * dp))
    train = TrainSection(steps=1, global_batch=global_batch, micro_batch=micro_batch)
    return train, Layout(draw(st.integers(1, 2)), draw(st.integers(1, 3)), dp, cp, ep)


@given(cases(), st.booleans())
def test_every_micro_batch_is_computed_once_and_they_count_alike(
    case: tuple[TrainSection, Layout], together: bool
) -> None:
    train, layout = case
    assert batch_fault(train, layout) == ""
    count = micro_batches(train)
    shares = [share_of(count, layout, rank, together) for rank in range(layout.dp)]
    if together:
        assert len({share.computed for share in shares}) == 1
    computed = sorted(itertools.chain(*(share.numbers for share in shares)))
    assert computed == list(range(micro_batches(train)))
    assert most_micro_batches(micro_batches(train), layout) == max(
        share.computed for share in shares
    )
    for share in shares:
        # Megatron divides by what the rank computes, and by dp.
        counts = share.weight / share.computed / layout.dp
        assert counts == pytest.approx(1 / micro_batches(train))
        assert all(
            later - sooner == layout.dp for sooner, later in itertools.pairwise(share.numbers)
        )


@given(cases())
def test_ranks_that_share_experts_compute_equally_many(case: tuple[TrainSection, Layout]) -> None:
    """Tokens go to experts among `ep` neighbouring replicas, through which a dp rank can be in a
    group with the one before and the one behind it."""
    train, layout = case
    computed: dict[int, set[int]] = defaultdict(set)
    for at in layout.coordinates():
        share = share_of(micro_batches(train), layout, layout.dp_rank(at))
        computed[at.replica // layout.ep].add(share.computed)
    assert all(len(counts) == 1 for counts in computed.values())


@given(cases())
def test_nothing_is_added_where_no_experts_are_shared_or_dp_divides_the_batch(
    case: tuple[TrainSection, Layout],
) -> None:
    train, layout = case
    assume(layout.cp % layout.ep == 0 or micro_batches(train) % layout.dp == 0)
    assert all(
        share_of(micro_batches(train), layout, rank).padding == 0 for rank in range(layout.dp)
    )


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "layout", "said"),
    [
        (7, 2, "dp2", "train.global_batch 7 is not a multiple of micro_batch 2"),
        (6, 2, "dp4", "3 micro-batches in the global batch are too few for dp=4"),
        (
            6,
            1,
            "pp2 vpp2 dp2",
            "wants 6 micro-batches in the global batch to be a multiple of dp x",
        ),
        (8, 1, "pp2 vpp2 dp2", ""),
        (7, 1, "dp4 cp2", ""),
    ],
)
def test_batches_that_cannot_be_shared(
    global_batch: int, micro_batch: int, layout: str, said: str
) -> None:
    train = TrainSection(steps=1, global_batch=global_batch, micro_batch=micro_batch)
    fault = batch_fault(train, Layout.parse(layout))
    assert said in fault
    assert bool(fault) == bool(said)
