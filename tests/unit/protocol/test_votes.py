"""Votes: equal copies agree in every pair of layouts, and any single altered digest is found."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import EXP_AVG, MAIN, PARAMETER
from liver_hpc.protocol.messages import ClassDigest, PairDigests, Vote
from liver_hpc.protocol.votes import (
    MODULUS,
    CopyIndex,
    Side,
    StateClass,
    disagreements,
    mismatches,
    unlike,
)


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = (draw(st.integers(1, 3)) for _ in range(3))
    cp = draw(st.integers(1, 2))
    ep = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6) if dp * cp % size == 0]))
    return Layout(tp, pp, dp, cp, ep)


layouts = _layouts()
state_classes = st.builds(
    StateClass,
    st.sampled_from([PARAMETER, MAIN, EXP_AVG]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@dataclass(frozen=True)
class Situation:
    """Two rank maps and what each of their workers reports."""

    source: RankMap
    target: RankMap
    votes: dict[int, Vote]


def _vote(worker: int, source: list[ClassDigest], target: list[ClassDigest]) -> Vote:
    return Vote(
        worker=worker,
        generation=1,
        ok=True,
        source=tuple(source),
        target=tuple(target),
    )


def _holders(rank_map: RankMap, state_class: StateClass) -> list[Coordinate]:
    """Coordinates that hold part of a class; a class on several stages is on first and last."""
    last = rank_map.layout.pp - 1
    return [
        at
        for at in rank_map.layout.coordinates()
        if not state_class.multi_stage or at.pp in (0, last)
    ]


def _disagreements(source: RankMap, target: RankMap, votes: dict[int, Vote]) -> list[str]:
    return disagreements(
        Side("source", source, {worker: vote.source for worker, vote in votes.items()}),
        Side("target", target, {worker: vote.target for worker, vote in votes.items()}),
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    layout, other = draw(layouts), draw(layouts)
    source = RankMap(layout, tuple(range(layout.workers)))
    first = draw(st.integers(0, layout.workers))
    target = RankMap(other, tuple(range(first, first + other.workers)))
    digests: dict[tuple[str, int], list[ClassDigest]] = {}
    for state_class in draw(st.lists(state_classes, min_size=1, max_size=4, unique=True)):
        whole = draw(st.integers(0, MODULUS - 1))
        for side, rank_map in (("source", source), ("target", target)):
            left: dict[CopyIndex, int] = {}
            holders = _holders(rank_map, state_class)
            last_of = {CopyIndex.of(state_class, rank_map.layout, at): at for at in holders}
            for at in holders:
                index = CopyIndex.of(state_class, rank_map.layout, at)
                rest = left.get(index, whole)
                part = rest if last_of[index] == at else draw(st.integers(0, MODULUS - 1))
                left[index] = (rest - part) % MODULUS
                digests.setdefault((side, rank_map.worker_at(at)), []).append(
                    ClassDigest(
                        kind=state_class.kind,
                        tp_replicated=state_class.tp_replicated,
                        multi_stage=state_class.multi_stage,
                        expert=state_class.expert,
                        value=f"{part:016x}",
                    )
                )
    workers = {*source.workers, *target.workers}
    votes = {
        w: _vote(w, digests.get(("source", w), []), digests.get(("target", w), [])) for w in workers
    }
    return Situation(source, target, votes)


@given(situations())
def test_equal_copies_agree(situation: Situation) -> None:
    assert _disagreements(situation.source, situation.target, situation.votes) == []


@given(situations(), st.data())
def test_any_single_altered_digest_is_found(situation: Situation, data: st.DataObject) -> None:
    places = [
        (worker, side, position)
        for worker, vote in sorted(situation.votes.items())
        for side in ("source", "target")
        for position in range(len(getattr(vote, side)))
    ]
    worker, side, position = data.draw(st.sampled_from(places))
    added = data.draw(st.integers(1, MODULUS - 1))
    vote = situation.votes[worker]
    reported = list(getattr(vote, side))
    digest = reported[position]
    value = (int(digest.value, 16) + added) % MODULUS
    reported[position] = digest.model_copy(update={"value": f"{value:016x}"})
    altered = {**situation.votes, worker: vote.model_copy(update={side: tuple(reported)})}

    found = _disagreements(situation.source, situation.target, altered)

    assert found
    assert all(text.startswith(digest.kind) for text in found)


@given(situations())
def test_a_class_that_nobody_reports_in_the_target_is_found(situation: Situation) -> None:
    lost = situation.votes[situation.source.workers[0]].source[0]
    votes = {
        worker: vote.model_copy(
            update={
                "target": tuple(
                    d for d in vote.target if d.model_copy(update={"value": lost.value}) != lost
                )
            }
        )
        for worker, vote in situation.votes.items()
    }

    found = _disagreements(situation.source, situation.target, votes)

    assert any("nobody reported it in the target" in text for text in found)


def _parameter(value: int, *, tp_replicated: bool = False) -> ClassDigest:
    return ClassDigest(
        kind=PARAMETER, tp_replicated=tp_replicated, multi_stage=False, value=f"{value:016x}"
    )


def test_the_text_names_kind_copy_and_workers() -> None:
    source = RankMap(Layout(1, 1, 1), (0,))
    target = RankMap(Layout(2, 1, 2), (0, 1, 2, 3))
    votes = {
        0: _vote(0, [_parameter(7)], [_parameter(3)]),
        1: _vote(1, [], [_parameter(4)]),
        2: _vote(2, [], [_parameter(3)]),
        3: _vote(3, [], [_parameter(5)]),
    }

    assert _disagreements(source, target, votes) == [
        "parameter (split over tp): target copy replica 1 (workers 2-3) is 0000000000000008, "
        "source copy replica 0 (workers 0) is 0000000000000007"
    ]


def test_a_copy_that_nobody_reports_is_missing() -> None:
    source = RankMap(Layout(1, 1, 1), (0,))
    target = RankMap(Layout(2, 1, 1), (0, 1))
    norm = _parameter(7, tp_replicated=True)
    votes = {0: _vote(0, [norm], [norm]), 1: _vote(1, [], [])}

    (text,) = _disagreements(source, target, votes)

    assert "target copy replica 0 tp 1 (workers 1) is missing" in text


def test_all_ep_ranks_together_hold_one_copy_of_the_experts() -> None:
    rank_map = RankMap(Layout(1, 1, 2, cp=2, ep=2), (0, 1, 2, 3))
    values = {0: 5, 1: 2, 2: 3, 3: 5}
    told = {
        worker: (
            ClassDigest(
                kind=PARAMETER,
                tp_replicated=False,
                multi_stage=False,
                expert=True,
                value=f"{value:016x}",
            ),
        )
        for worker, value in values.items()
    }
    assert disagreements(Side("world", rank_map, told)) == [
        "parameter (split over tp, of experts): world copy replica 1 (workers 2-3) is "
        "0000000000000008, world copy replica 0 (workers 0-1) is 0000000000000007"
    ]


def test_votes_without_any_digest_do_not_agree() -> None:
    rank_map = RankMap(Layout(1, 1, 1), (0,))
    assert _disagreements(rank_map, rank_map, {0: _vote(0, [], [])}) == [
        "no worker reported any digest"
    ]


@given(situations())
def test_equal_copies_agree_within_one_world_and_across_a_disk(situation: Situation) -> None:
    """Also where the two worlds' worker ids overlap: they are of different lives."""
    target, votes = situation.target, situation.votes
    saved = {worker: vote.source for worker, vote in votes.items()}
    restored = {worker: vote.target for worker, vote in votes.items()}
    source = Side("saved", situation.source, saved)
    assert disagreements(source) == []
    assert disagreements(source, Side("restored", target, restored)) == []


def test_copies_of_one_world_that_have_diverged_are_found() -> None:
    rank_map = RankMap(Layout(1, 1, 2), (4, 9))
    (text,) = disagreements(Side("world", rank_map, {4: (_parameter(7),), 9: (_parameter(8),)}))
    assert "world copy replica 1 (workers 9) is 0000000000000008" in text


def test_what_was_restored_is_told_apart_from_what_was_saved() -> None:
    rank_map = RankMap(Layout(1, 1, 1), (0,))
    found = disagreements(
        Side("saved", rank_map, {0: (_parameter(7),)}),
        Side("restored", rank_map, {0: (_parameter(8),)}),
    )
    assert found == [
        "parameter (split over tp): restored copy replica 0 (workers 0) is 0000000000000008, "
        "saved copy replica 0 (workers 0) is 0000000000000007"
    ]


def test_worlds_whose_specs_class_tensors_otherwise_are_compared_as_wholes() -> None:
    """As a checkpoint of a run without tensor parallelism, read by one that has it."""
    alone, pair = RankMap(Layout(1, 1, 1), (0,)), RankMap(Layout(2, 1, 1), (0, 1))

    def digest(copied: bool, value: int) -> ClassDigest:
        return ClassDigest(
            kind=PARAMETER, tp_replicated=copied, multi_stage=False, value=f"{value:016x}"
        )

    saved = Side("saved", alone, {0: (digest(True, 10),)})
    for mine, equal in ((3, True), (4, False)):
        told = {0: (digest(True, 5), digest(False, mine)), 1: (digest(True, 5), digest(False, 2))}
        found = unlike(saved, Side("restored", pair, told))
        assert (found == []) is equal
    assert found == ["parameter: saved is 000000000000000a, restored is 000000000000000b"]
    copies_differ = {0: (digest(True, 10),), 1: (digest(True, 9),)}
    assert unlike(saved, Side("restored", pair, copies_differ))


def test_kinds_that_crossed_together_are_compared_with_the_same_told_one_by_one() -> None:
    def told(kinds: tuple[str, ...], peers: tuple[int, ...], *digests: int) -> PairDigests:
        values = "".join(f"{value:016x}" for value in digests)
        return PairDigests(kinds=kinds, peers=peers, values=values)

    def vote(worker: int, sent: tuple[PairDigests, ...], received: tuple[PairDigests, ...]) -> Vote:
        return Vote(worker=worker, generation=1, ok=True, sent=sent, received=received)

    sent = told(("main", "exp_avg"), (1, 2), 11, 12, 21, 22), told(("parameter",), (2,), 32)
    arrived = told(("exp_avg",), (0,), 21), told(("main",), (0,), 11)
    votes = {
        0: vote(0, sent, ()),
        1: vote(1, (), arrived),
        2: vote(2, (), (told(("parameter", "main", "exp_avg"), (0,), 32, 12, 22),)),
    }
    planned = {0: (1, 2), 1: (), 2: ()}
    assert [*mismatches(votes, planned)] == []
    votes[1] = vote(1, (), (told(("exp_avg", "main"), (0,), 21, 99),))
    assert [*mismatches(votes, planned)] == [
        f"main from worker 0 to 1: {11:016x} left, {99:016x} arrived"
    ]


def test_what_was_to_cross_and_of_which_neither_end_tells_is_found() -> None:
    """As where both ends have left the same move out."""
    votes = {worker: _vote(worker, [], []) for worker in (0, 1, 2)}
    assert [*mismatches(votes, {0: (), 1: (), 2: ()})] == [], "nothing was to cross"
    digests = {"kinds": ("main",), "values": f"{7:016x}"}
    votes[0] = votes[0].model_copy(update={"sent": (PairDigests(peers=(1,), **digests),)})
    votes[1] = votes[1].model_copy(update={"received": (PairDigests(peers=(0,), **digests),)})
    assert [*mismatches(votes, {0: (1,), 1: (), 2: ()})] == []
    assert [*mismatches(votes, {0: (1, 2), 1: (), 2: (1,)})] == [
        "nobody told what crossed from worker 0 to 2",
        "nobody told what crossed from worker 2 to 1",
    ]
