"""When a snapshot is taken, when it counts, and what becomes of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_hpc.errors import DeadlineError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.snapshots import BOUNDARIES_HELD, largest_snapshot, most_held_bytes
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.messages import Unprotected
from liver_hpc.run.salvage import newest
from liver_hpc.snapshot import memory
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.world.device import Device
from liver_hpc.world.steps import Flags
from tests.unit.layout.models import TIED
from tests.unit.snapshot import rig
from tests.unit.snapshot.rig import (
    ALONE,
    LIMIT_S,
    PAIR,
    TRIO,
    Keeper,
    PlayedExchange,
    of_a_pair,
    played_exchanges,
)
from tests.unit.snapshot.states import CPU

NOT_YET, FAILED = Flags(), Flags(snapshot_failed=True)


def complete(took_steps: float) -> Flags:
    return Flags(snapshot=True, snapshot_steps=took_steps)


COMPLETE = complete(0.5)


@pytest.fixture(autouse=True)
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with played_exchanges(monkeypatch):
        yield


# ---- when one is taken


@pytest.mark.parametrize(("every_steps", "taken"), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 3])])
def test_one_is_taken_every_so_many_steps(every_steps: int, taken: list[int]) -> None:
    one = of_a_pair(every_steps)
    for _ in range(6):
        one.train()
    assert one.steps_sent == taken


def test_a_buffer_is_as_it_was_at_the_boundary_though_the_forward_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = replace(TIED.tensors[-1], role="buffer")
    model = replace(TIED, tensors=(*TIED.tensors[:-1], buffer))
    monkeypatch.setattr(rig, "TIED", model)
    monkeypatch.setattr(SlowDevice, "may_come", threading.Event())
    one = of_a_pair(1, device=SlowDevice(CPU))
    place = PARAMETER, len(model.tensors) - 1, buffer.whole
    view = one.world.state.view(*place)
    before = view.clone()
    one.snapshots.begin(one.world, 0)
    view.add_(1.0)
    SlowDevice.may_come.set()
    one.snapshots.taken()
    taking = one.snapshots._taking
    assert taking is not None
    held = taking.pending[0].find(*place)
    assert held is not None
    assert torch.equal(held.view(torch.float32), before)


def test_without_snapshots_there_are_none() -> None:
    one = of_a_pair(None)
    assert one.train() == Flags()
    assert not PlayedExchange.made
    assert one.held == []


@pytest.mark.parametrize(
    ("cost", "took_steps", "every"),
    [(0.02, (0.05, 0.05), 3), (0.02, (0.01, 0.05), 2), (0.5, (0.1, 0.1), 1), (0.1, (2.0, 4.0), 30)],
)
def test_auto_is_as_often_as_the_measured_cost_allows(
    cost: float, took_steps: tuple[float, float], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By what all workers took in the mean, of the one that was last. It is logged once, also
    where it is every step."""
    caplog.set_level(logging.INFO)
    one = of_a_pair("auto", cost=cost)
    for _ in range(2):
        train_until_taken(one)
        one.cross()
        one.agree(*map(complete, took_steps))
    assert one.steps_sent == [0, every]
    (said,) = [text for text in caplog.messages if text.startswith("snapshots every")]
    assert said.startswith(f"snapshots every {every} steps: one takes ")


def train_until_taken(one: Keeper) -> None:
    """To the middle of the step beside which the next one is taken."""
    while True:
        one.begin()
        if one.snapshots._taking.pending:  # type: ignore[union-attr]
            return
        one.agree(one.flags(), NOT_YET)


def test_auto_begins_anew_as_the_next_one_shows_another_cost() -> None:
    one = of_a_pair("auto", cost=0.1)
    for took_steps in (0.2, 0.4, 0.1):
        train_until_taken(one)
        one.cross()
        one.agree(complete(took_steps), complete(took_steps))
    assert one.steps_sent == [0, 2, 6]


def test_what_is_told_of_the_cost_is_the_cpu_time_in_steps() -> None:
    one = of_a_pair("auto")
    one.begin()
    one.exchange.used_s = 10.0
    assert one.flags() == Flags(), "and nobody waits"
    one.cross()
    taking = one.snapshots._taking
    assert taking is not None
    assert 10.0 < taking.cpu_s < 11.0, "also what sends and receives has used"
    taking.cpu_s = 0.5
    assert one.flags(step_s=2.0) == complete(0.25)


def test_where_it_is_due_again_the_step_waits_for_the_last_one() -> None:
    one = of_a_pair(2)
    one.begin()
    one.agree(one.flags(), NOT_YET)
    one.begin()
    timer = threading.Timer(0.2, one.cross)
    timer.start()
    began_s = time.monotonic()
    assert one.flags().snapshot
    assert time.monotonic() - began_s > 0.1
    timer.join()


def test_waiting_has_an_end_that_says_what_for() -> None:
    one = of_a_pair(1, limit_s=0.05)
    one.begin()
    with pytest.raises(DeadlineError, match="the snapshot of step 0 to be complete"):
        one.flags()


def test_in_a_world_of_one_there_are_none_and_what_was_held_goes() -> None:
    one = of_a_pair(1)
    one.train()
    one.train()
    assert one.held == [1, 1]
    one.enter(ALONE, generation=1)
    one.begin()
    assert one.held == []
    assert one.steps_sent == [0, 1]


# ---- when it counts


def test_it_counts_once_all_have_told_and_the_one_before_goes_only_then() -> None:
    one = of_a_pair(1)
    one.train()
    assert one.held == [0, 0]
    one.begin()
    one.cross()
    assert one.flags().snapshot
    one.agree(COMPLETE, NOT_YET)
    assert one.held == [0, 0], "the other one has not told"
    one.begin()
    one.agree(one.flags(), COMPLETE)
    assert one.held == [1, 1], "nothing newer was begun meanwhile"
    assert one.steps_sent == [0, 1]


def places_of(snapshots: Sequence[Snapshot], num_bytes: int | None = None) -> set[int]:
    """Of their chunks, or of those of one size."""
    chunks = [chunk for each in snapshots for chunk in each.chunks]
    return {each.data_ptr() for each in chunks if num_bytes in (None, len(each))}


def bytes_of(snapshots: Sequence[Snapshot]) -> int:
    return sum(chunk.numel() for each in snapshots for chunk in each.chunks)


def test_the_memory_of_the_one_before_is_written_next() -> None:
    one = of_a_pair(1)
    places = set()
    for _ in range(5):
        one.train()
        places |= places_of(one.snapshots._complete)
    assert len(places) == 2 * BOUNDARIES_HELD


def test_in_the_next_world_there_are_no_more_of_them() -> None:
    """What is complete stays until the new world has one; what is not, here, goes at once."""
    one = of_a_pair("auto")
    one.train()
    one.begin()
    one.agree(NOT_YET, NOT_YET)
    one.enter(PAIR, generation=1)
    one.begin()
    taking = one.snapshots._taking
    assert taking is not None
    assert (
        len(one.snapshots._complete) + len(taking.pending) + len(taking.spare)
        == 2 * BOUNDARIES_HELD
    )
    assert [each.generation for each in one.snapshots.held()] == [0, 0]
    one.cross()
    one.agree(COMPLETE, COMPLETE)
    assert [each.generation for each in one.snapshots.held()] == [1, 1]


# ---- across a handoff


@pytest.mark.parametrize("under_way", [True, False])
def test_another_world_writes_into_the_memory_of_the_one_before(
    under_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its layout; but not where a peer of the old world may write still, nor where what
    is complete lies before the new one is."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1024)
    one = of_a_pair(1)
    for _ in range(3):
        one.train()
    taking = one.snapshots._taking
    assert taking is not None
    complete = places_of(one.snapshots._complete, 1024)
    if under_way:
        one.begin()
        own, ward = taking.pending
        free, written = places_of([own], 1024), places_of([ward])
    else:
        free, written = places_of(taking.spare, 1024), set()
    assert free
    one.enter(RankMap(Layout(2, 1, 1), PAIR.workers), generation=1)
    one.begin()
    one.cross()
    new = one.snapshots._taking
    assert new is not None
    first = places_of(new.pending)
    assert free <= first
    assert not complete & first
    one.agree(COMPLETE, COMPLETE)
    one.train()
    second = places_of(one.snapshots._complete)
    assert complete <= second
    assert not (first | second) & written
    one.train()
    assert not one.snapshots._memory._free, "no more than this world needs"


@pytest.mark.parametrize("crosses", [True, False])
def test_a_worlds_last_boundary_is_copied_beside_the_next_ones_first_step(crosses: bool) -> None:
    """So a loss in the second one goes back to where the first one began."""
    one = of_a_pair(1, limit_s=LIMIT_S if crosses else 0.2)
    one.train()
    one.snapshots.begin(one.world, one.step, leaves=True)
    one.snapshots.taken()
    old, change = one.snapshots._taking, threading.Timer(0.1, one.cross)
    if crosses:
        change.start()
    one.snapshots.keep_pace(one.step + 1)  # and for ever it does not wait
    change.cancel()
    one.enter(PAIR, generation=1)
    one.step += 1
    one.begin()
    assert one.snapshots._taking is not old
    assert one.held == ([1, 1, 0, 0] if crosses else [0, 0])
    held = bytes_of(one.snapshots._complete)
    pending = bytes_of(one.snapshots._taking.pending)  # type: ignore[union-attr]
    share = largest_snapshot(TIED, PAIR.layout)
    assert held + pending == (3 if crosses else 2) * 2 * share
    assert most_held_bytes({PAIR.layout: 2 * share}) == 3 * 2 * share
    one.cross()
    one.agree(one.flags(), COMPLETE)
    assert one.held == [2, 2]


def test_one_that_is_taken_now_and_then_holds_nobody_up_in_a_handoff() -> None:
    one = of_a_pair("auto")
    one.snapshots.begin(one.world, one.step, leaves=True)
    began_s = time.monotonic()
    one.snapshots.keep_pace(one.step + 1)
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_world_of_one_is_copied_when_it_is_left() -> None:
    """Else the loss of a worker that has just joined would take what only that one has now."""
    one = of_a_pair(1)
    one.enter(ALONE, generation=0)
    one.begin()
    one.snapshots.begin(one.world, one.step, leaves=True)
    one.cross()
    one.snapshots.keep_pace(one.step + 1)
    one.enter(PAIR, generation=1)
    one.step += 1
    one.begin()
    assert one.held == [0]
    one.enter(ALONE, generation=2)
    one.begin()
    assert one.held == []


def test_that_the_last_one_fails_is_told_only_where_the_world_trains_on() -> None:
    one = of_a_pair(1)
    one.snapshots.begin(one.world, one.step, leaves=True)
    one.cross(fails="the leaver is gone")
    assert one.said == []
    one.begin()
    assert [said.reason for said in one.said] == ["TransferError: the leaver is gone"]


class Crew:
    """Three workers that train in step, each event of each in an order that is drawn. counted: the
    newest step that anybody counts as complete. learnt: by step, what they know of failures."""

    def __init__(self) -> None:
        PlayedExchange.made, PlayedExchange.shares = [], {}
        self.keepers = [Keeper(worker, "auto") for worker in TRIO.workers]
        for each in self.keepers:
            each.enter(TRIO, generation=0)
        self.flags: list[dict[Keeper, Flags]] = [{}]
        self.learnt: defaultdict[int, set[NamedTuple]] = defaultdict(set)
        self.counted = -1

    def able(self) -> list[tuple[str, Keeper]]:
        found = []
        for each in self.keepers:
            taking = each.snapshots._taking
            # As the next steps' flags are told once all have told those of this one.
            if each.step == len(self.flags) - 1 and each not in self.flags[-1]:
                found.append(("train", each))
            elif len(self.flags[each.step]) == len(self.keepers):
                found.append(("agree", each))
            if taking is not None and taking.pending and not taking.done.is_set():
                step = taking.pending[0].scalars.step  # type: ignore[union-attr]
                mine = each.exchange
                if all((0, step, rank) in mine.shares for rank in mine.wards):
                    found += [("cross", each)] * 3
                found.append(("fail", each))
        return found

    def do(self, what: str, one: Keeper) -> None:
        if what in ("cross", "fail"):
            one.cross(fails="the link is down" if what == "fail" else "")
        elif what == "train":
            one.begin()
            taking = one.snapshots._taking
            if taking is not None and taking.pending and taking.step == one.step:
                assert one.exchange.begun.wait(LIMIT_S)
            self.flags[-1][one] = one.flags()
        else:
            told = self.flags[one.step].values()
            one.agree(*told, members=len(self.keepers))
            self.learnt[one.step].add(one.snapshots._failures)
            assert len(self.learnt[one.step]) == 1, "else some would wait for others' exchange"
            if one.step == len(self.flags):
                self.flags.append({})
            self.counted = max(self.counted, *one.held, -1)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 7), min_size=30, max_size=90), st.integers(0, 2))
def test_whenever_one_of_them_is_lost_a_boundary_is_left_whole(order: list[int], lost: int) -> None:
    """At least the newest that anybody counts; and what is held is what it was then."""
    crew = Crew()
    for number in order:
        able = crew.able()
        crew.do(*able[number % len(able)])
    for each in crew.keepers:
        each.snapshots.interrupt(0)
        each.snapshots.halt()
    left = [each for place, each in enumerate(crew.keepers) if place != lost]
    if crew.counted >= 0:
        salvage = newest({each.worker: each.snapshots.held() for each in left})
        assert salvage is not None
        assert salvage.scalars.step >= crew.counted
    for each in crew.keepers:
        for snapshot in each.snapshots._complete:
            assert snapshot.digest() == snapshot.digests


# ---- when it fails, and when training halts


def test_where_the_partner_fails_it_is_told_and_tried_again_ever_more_seldom() -> None:
    """What is complete stays meanwhile, and nobody waits for a way that has failed."""
    one = of_a_pair(1)
    one.train()
    tried = []
    for _ in range(20):
        one.begin()
        if (taking := one.snapshots._taking) is not None and taking.pending:
            tried.append(one.step)
            if len(tried) > 1:
                assert one.flags() == NOT_YET, "it is under way"
            one.cross(fails="the link is down")
            assert one.flags() == FAILED
            assert one.exchange.fails == "closed", "else its peers would wait for it"
        one.agree(one.flags(), NOT_YET)
        assert one.held == [0, 0]
    assert tried == [1, 2, 4, 8, 16]
    told = {"worker": 4, "generation": 0, "reason": "TransferError: the link is down"}
    assert one.said == [Unprotected(step=step, **told) for step in tried]
    one.enter(PAIR, generation=1)
    one.train()
    assert one.held == [21, 21], "in the next world it begins anew"


def test_where_another_one_fails_all_open_another_exchange_at_the_same_boundary() -> None:
    one = of_a_pair(1)
    one.train()
    one.begin()
    one.cross()
    first = one.exchange
    one.agree(one.flags(), FAILED)
    assert one.held == [0, 0]
    assert one.said == []
    one.train()
    assert one.exchange is not first
    assert one.held == [2, 2]
    one.begin()
    one.cross(fails="the link is down")
    one.agree(one.flags(), NOT_YET)
    assert one.train().snapshot, "it has crossed since, so it is tried again at once"
    assert one.held == [4, 4]


def test_who_waits_is_freed_by_an_interrupt_and_nobody_is_told() -> None:
    one = of_a_pair(1)
    one.begin()
    timer = threading.Timer(0.2, one.snapshots.interrupt, (0,))
    timer.start()
    began_s = time.monotonic()
    assert one.flags() == Flags()
    assert 0.1 < time.monotonic() - began_s < LIMIT_S / 2
    timer.join()
    one.agree(NOT_YET, NOT_YET)
    one.begin()
    assert (one.said, one.held, one.steps_sent) == ([], [], [0])


@pytest.mark.parametrize("crosses", [True, False])
def test_halted_it_holds_what_others_may_count_already(crosses: bool) -> None:
    one = of_a_pair("auto")
    one.train()
    one.begin()
    if crosses:
        one.cross()
    one.snapshots.halt()
    assert one.held == ([1, 1, 0, 0] if crosses else [0, 0])
    taken = threading.active_count()
    one.snapshots.halt()
    assert threading.active_count() <= taken


class SlowDevice(Device):
    """Whose host memory takes as long to come to be as the test says."""

    may_come = threading.Event()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        assert self.may_come.wait(LIMIT_S)
        return super().host_memory(num_bytes)


def test_halted_while_its_memory_comes_to_be_it_reads_no_state_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That state's memory is freed then."""
    read: list[Snapshot] = []
    monkeypatch.setattr(Snapshot, "take", lambda self, *_: read.append(self))
    monkeypatch.setattr(SlowDevice, "may_come", threading.Event())
    one = of_a_pair(1, device=SlowDevice(CPU))
    one.snapshots.begin(one.world, one.step)
    taking = one.snapshots._taking
    assert taking is not None
    timer = threading.Timer(0.2, SlowDevice.may_come.set)
    timer.start()
    one.snapshots.halt()
    taking.join(LIMIT_S)
    assert read == []
    assert one.said == []
    timer.join()


class FullDevice(Device):
    """Whose host has no memory left."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_halted_where_there_was_no_memory_it_asks_for_none() -> None:
    one = of_a_pair(1, device=FullDevice(CPU))
    one.snapshots.begin(one.world, one.step)
    taking = one.snapshots._taking
    assert taking is not None
    taking.join(LIMIT_S)
    one.snapshots.halt()
    assert one.snapshots._memory._free == []


def test_the_state_is_that_of_one_boundary_of_one_world() -> None:
    one = of_a_pair("auto")
    one.train()
    one.begin()
    one.cross()
    one.snapshots.halt()
    model, (new, _, old, _) = one.world.state.model, one.snapshots.held()
    for told in (new, old):
        state = one.snapshots.state(model, 0, told.scalars, None)
        assert {each.scalars for each in state._snapshots} == {told.scalars}
        assert [each.rank for each in state._snapshots] == [0, 1]
    assert not one.snapshots.state(model, 1, new.scalars, None)._snapshots


def test_after_a_failure_who_has_just_joined_opens_the_next_exchange_where_all_do() -> None:
    """It does not know how often the others had them taken before it came."""
    again = []
    for before in (1, 5):
        one = of_a_pair("auto")
        one.snapshots._every = before
        one.begin()
        one.cross(fails="the link is down")
        one.agree(one.flags(), NOT_YET)
        again.append(one.snapshots._failures.again)
    assert again == [1, 1]
