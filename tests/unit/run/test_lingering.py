"""Who has left, or has no seat, and stays until the next world has a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liver_hpc.config.schema import RunConfig
from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.events import NodeWarned
from liver_hpc.run.lifecycle import RunState
from tests.unit.run.begun import (
    goes_on_until,
    lose,
    of,
    recoveries,
    that_has_replaced,
    that_recovers,
    told_to_exit,
    training,
)
from tests.unit.run.outside import PlayedWorker
from tests.unit.run.play import Play
from tests.unit.run.scenes import ANY_NUMBER, DEADLINES, SCENES


def test_a_leaver_stays_until_the_next_world_has_a_snapshot() -> None:
    play = that_has_replaced()
    assert [*play.run.agents.lingering] == [1]
    assert told_to_exit(play) == set()
    play.train()
    play.settle()
    assert told_to_exit(play) == {1}


def test_a_leaver_stays_for_as_long_as_the_steps_take_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HandoffEstimator, "steps_s", lambda *_of: 400.0)
    play = that_has_replaced()
    assert play.run.agents.lingering[1].limit_s == DEADLINES["boundary_s"] + 400.0


def test_nobody_stays_for_a_world_of_one_worker() -> None:
    """It takes no snapshots, so that they would stay for as long as they may."""
    play = that_has_replaced()
    play.workers[0]._newest_snapshot = lambda: None  # type: ignore[method-assign]
    assert play.ask(m.ResizeRequest(workers=1)).ok
    while play.run.world is None or len(play.run.world.rank_map.workers) != 1:
        play.train()
        play.settle()
    assert not play.run.agents.lingering
    assert 1 in told_to_exit(play)


def test_a_loss_right_after_a_handoff_is_made_good_from_the_leavers_snapshots() -> None:
    play = that_has_replaced()
    lose(play, 0)
    play.settle()
    assert play.run.state is RunState.TRAINING
    (row,) = recoveries(play)
    assert (row.lost, row.target, row.steps_redone) == ("0", "tp1 pp1 dp1", 1)
    assert play.run.world is not None
    assert play.run.world.rank_map.workers == (2,)
    assert 1 in told_to_exit(play)


def of_four() -> Play:
    """Four workers that have trained, with no layout for three."""
    scene = next(scene for scene in SCENES if scene.name == "snapshots")
    some = {number: ANY_NUMBER[number] for number in (1, 2, 4)}
    sections = {"layouts": some, "workers": {"initial": 4, "max": 4}}
    config = RunConfig.model_validate(scene.config.model_dump() | sections)
    play = training(replace(scene, config=config))
    for _ in range(3):
        play.train()
        play.settle()
    return play


def two_of_four() -> tuple[Play, tuple[int, ...], int]:
    """Worker 3 was lost: two of the others train, which are told with the one that has no seat."""
    play = of_four()
    lose(play, 3)
    play.settle()
    assert play.run.world is not None
    seats = play.run.world.rank_map.workers
    (unseated,) = {0, 1, 2} - {*seats}
    return play, seats, unseated


def test_a_survivor_without_a_seat_stays_until_the_next_world_has_a_snapshot() -> None:
    play, _, unseated = two_of_four()
    assert [*play.run.agents.lingering] == [unseated]
    assert told_to_exit(play) == set()
    play.train()
    play.settle()
    assert told_to_exit(play) == {unseated}


def test_a_survivor_without_a_seat_has_one_after_the_next_loss() -> None:
    """Which comes before the new world has a snapshot: only those of the old one are left."""
    play, seats, unseated = two_of_four()
    lose(play, seats[0])
    play.settle()
    assert play.run.world is not None
    assert play.run.state is RunState.TRAINING
    assert {*play.run.world.rank_map.workers} == {seats[1], unseated}
    assert [row.step for row in recoveries(play)] == [2, 2]
    assert not play.run.agents.lingering


def test_a_survivor_without_a_seat_gives_and_sits_when_filling_begins_anew() -> None:
    play = of_four()
    lose(play, 3)
    while play.run.recoveries._now is None or play.run.recoveries._now.target is None:
        play.go_on(draw=False)
    seats = play.run.recoveries._now.target.rank_map.workers
    lose(play, seats[0])
    play.settle()
    assert play.run.world is not None
    assert {*play.run.world.rank_map.workers} == {0, 1, 2} - {seats[0]}
    (row,) = recoveries(play)
    assert (row.lost, row.rounds, row.step) == (f"{seats[0]},3", 2, 2)


def test_a_leaver_that_did_not_answer_is_not_asked_again() -> None:
    play = that_has_replaced()
    lose(play, 0)
    goes_on_until(play, lambda: bool(play.run.recoveries._now and play.run.recoveries._now.target))
    play.workers[1].mute = True
    play.settle()
    play.wait(DEADLINES["prepare_s"] + DEADLINES["transfer_s"] + 1.0)
    sent = [each for _, _, done in play.entries for each in of(a.Send, done)]
    halts = [each.workers for each in sent if isinstance(each.message, m.Halt)]  # type: ignore[attr-defined]
    assert halts == [(2, 1), (2,)]
    assert 1 in told_to_exit(play)


def test_a_leaver_that_ends_early_costs_nothing() -> None:
    play = that_has_replaced()
    lose(play, 1)
    play.train()
    play.settle()
    assert play.run.state is RunState.TRAINING
    assert recoveries(play) == []


def test_a_warning_that_comes_later_ends_lingering_in_time() -> None:
    play = that_has_replaced()
    assert play.run.agents.lingering[1].remaining_s() > 20.0
    node = play.run.agents.node_of(1)
    play.feed(NodeWarned(node, "preempted", play.now_s, play.now_s + 20.0))
    left_s = 20.0 - play.run.agents.exit_s
    assert play.run.agents.lingering[1].remaining_s() == pytest.approx(left_s, abs=0.01)


def test_a_node_that_has_to_be_left_does_not_wait_for_who_lingers() -> None:
    play = that_has_replaced()
    assert play.run.agents.ending()
    assert not play.run.agents.ending(lingering=False)
    node = play.run.agents.node_of(0)
    play.feed(NodeWarned(node, "preempted", play.now_s, play.now_s + 1_000.0))
    assert play.run.state is not RunState.TRAINING


def test_a_leaver_does_not_stay_until_its_node_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    play = that_recovers()
    monkeypatch.setattr(PlayedWorker, "_newest_snapshot", lambda _worker: None)
    (node,) = {play.run.agents.node_of(worker) for worker in (0, 1)}
    taken_s = play.now_s + DEADLINES["boundary_s"]
    play.feed(NodeWarned(node, "preempted", play.now_s, taken_s))
    while play.run.world is None or 1 in play.run.world.rank_map.workers:
        play.train()
        play.settle()
    assert play.run.world.rank_map.layout.workers == 2
    assert told_to_exit(play) == set()
    play.wait(taken_s - play.run.agents.exit_s - play.now_s)
    assert told_to_exit(play) == {0, 1}
