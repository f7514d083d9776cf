"""`policy.observe`: what the run says that it would have done, and what it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from liver_hpc.config.schema import RunConfig
from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.events import Node
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.observation import WOULD_HAVE
from liver_hpc.run.records import ObservationRecord
from tests.unit.run.begun import lose
from tests.unit.run.choices import Choices
from tests.unit.run.endings import forsaken, replays
from tests.unit.run.play import Play
from tests.unit.run.scenes import ANY_NUMBER, FASTEST, SCENES, Scene, burst, observed
from tests.unit.run.storm import storm

LONG_S = 100_000.0
"""A window in which any handoff could be done."""
TWO_NODES, MACHINE, WIDE_NODES = SCENES[:3]


def observing(scene: Scene = WIDE_NODES) -> Play:
    """Two workers that train, in a run that only observes."""
    play = Play(observed(scene), Choices(b""))
    play.begin()
    play.settle()
    assert play.run.state is RunState.TRAINING
    return play


def told(play: Play) -> list[ObservationRecord]:
    """All that was recorded; the status and the notes say as much."""
    actions = [action for _, _, done in play.entries for action in done]
    rows = [each.row for each in actions if isinstance(each, a.Record)]
    found = [row for row in rows if isinstance(row, ObservationRecord)]
    notes = [each.text for each in actions if isinstance(each, a.Note)]
    notes = [text for text in notes if text.startswith(WOULD_HAVE)]
    status = play.run.snapshot(play.now_s, "", "")
    assert len(found) == len(notes) == status.observed
    assert status.would_have == (notes[-1] if notes else "")
    return found


def of(kind: type[a.Action], play: Play) -> list[a.Action]:
    return [each for _, _, done in play.entries for each in done if isinstance(each, kind)]


def layout_of(play: Play) -> str:
    assert play.run.world is not None
    return str(play.run.world.rank_map.layout)


def warned(play: Play, node: str, window_s: float | None, reason: str = "preempted") -> None:
    deadline_s = None if window_s is None else play.now_s + window_s
    play.feed(e.NodeWarned(node, reason, play.now_s, deadline_s))


# ---- growing


def test_growing_is_told_once_for_each_node_that_comes_and_not_done() -> None:
    play = observing(TWO_NODES)
    for number in (3, 4):
        play.grant(Node(f"n{number}", "main", 1))
        play.hear_pool()
        for _ in range(5):
            play.wait(3.0)
    assert [(row.notice, row.source, row.target, row.instead) for row in told(play)] == [
        ("nodes granted", "tp1 pp1 dp2", "tp1 pp1 dp3", "stays as it is"),
        ("nodes granted", "tp1 pp1 dp2", "tp1 pp1 dp4", "stays as it is"),
    ]
    assert (play.run.handoffs.generation, layout_of(play)) == (0, "tp1 pp1 dp2")
    assert all(row.cost_s > 0 and row.ready_s > 0 for row in told(play))


def test_nodes_that_would_not_be_used_are_not_asked_for() -> None:
    """`workers.initial` bounds what is asked for, until somebody asks for more."""
    play = observing()  # four slots, of which two are used
    play.wait(1.0)
    assert {action.workers for action in of(a.WantWorkers, play)} == {0}  # type: ignore[attr-defined]


def test_burst_nodes_that_would_have_been_asked_for_are_told_once() -> None:
    play = observing(SCENES[3])  # one node, one worker; burst nodes for three more
    for _ in range(5):
        play.wait(3.0)
    (row,) = told(play)
    assert (row.notice, row.target, row.instead) == ("burst nodes", "tp2 pp1 dp2", "asks for none")
    assert {action.workers for action in of(a.WantWorkers, play)} == {0}  # type: ignore[attr-defined]
    assert "for 3 more workers" in play.run.elastic.observer.last


def test_burst_nodes_are_told_once_where_a_loss_makes_fewer_workers_enough_for_a_while() -> None:
    """Steps of a batch that grows are done again; a tick of which nothing follows, and which is not
    in the journal, changes nothing."""
    auto = FASTEST.config.model_copy(update={"cluster": SCENES[3].config.cluster})
    sections = auto.model_dump() | {"layouts": {1: {}, 4: {"dp": 4}}}
    sections["workers"]["initial"] = 1
    play = observing(replace(SCENES[3], config=RunConfig.model_validate(sections)))
    values = {"worker": 0, "generation": 0, "loss": 4.0, "grad_norm": 1.0, "learning_rate": 0.1}
    for step, took_s, times in ((0, 1.0, 0), (50, 8.0, 1), (0, 1.0, 1), (50, 8.0, 1)):
        began_s = play.now_s
        play.wait(took_s)
        ends = {"started_s": began_s, "ended_s": play.now_s}
        play.feed(m.StepDone.model_validate({**values, **ends, "step": step, "tokens": 8}))
        play.wait(3.0)
        assert len(told(play)) == times
    replays(play)


# ---- what somebody asks for


def test_what_an_operator_asks_for_is_done() -> None:
    play = observing(MACHINE)
    assert play.ask(m.ResizeRequest(workers=4)).text.startswith("started")
    play.calm()
    assert layout_of(play) == "tp2 pp1 dp2"
    assert play.ask(m.ReplaceRequest(replace=0)).ok
    play.calm()
    assert play.run.world is not None
    assert 0 not in play.run.world.rank_map.workers
    assert [row.outcome for row in play.watch.records] == ["completed"] * 2


def test_a_notice_of_the_run_file_is_done() -> None:
    play = observing(SCENES[4])
    while play.run.state is not RunState.ENDED:
        play.train()
        play.calm()
        play.go_on()
    assert {row.notice.partition("(")[2] for row in play.watch.records} == {
        "step 1)", "step 2)", "step 3)"
    }  # fmt: skip
    assert told(play) == []


def test_growing_to_as_many_as_somebody_has_asked_for_is_done() -> None:
    """Burst nodes that a request has to wait for come later, and are grown onto."""
    play = observing(SCENES[3])
    answer = play.ask(m.ResizeRequest(layout="tp=2,dp=2"))
    assert answer.text.startswith("waits for burst nodes")
    assert of(a.WantWorkers, play)[-1] == a.WantWorkers(3)
    for node in (burst(4, 2), burst(5)):
        play.grant(node)
    play.hear_pool()
    play.wait(3.0)
    play.calm()
    assert layout_of(play) == "tp2 pp1 dp2"


def test_a_node_that_an_operator_drains_is_left_live() -> None:
    play = observing()
    assert play.ask(m.ResizeRequest(workers=4)).ok
    play.calm()
    assert play.ask(m.DrainRequest(node="w2", within_s=LONG_S)).ok
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    assert told(play) == []


@pytest.mark.parametrize(("asked", "workers"), [(False, 1), (True, 2)])
def test_others_come_in_the_place_of_the_lost_where_somebody_has_asked_for_as_many(
    asked: bool, workers: int
) -> None:
    initial = 2 - asked
    sections = {
        "snapshots": {"every_steps": 1},
        "layouts": ANY_NUMBER,
        "workers": {"initial": initial, "max": 4},
    }
    config = RunConfig.model_validate(MACHINE.config.model_dump() | sections)
    play = observing(replace(MACHINE, config=config))
    if asked:
        assert play.ask(m.ResizeRequest(workers=2)).ok
        play.calm()
    for _ in range(4):
        play.train()
        play.settle()
    assert play.run.world is not None
    lose(play, play.run.world.rank_map.workers[1])
    for _ in range(4):
        play.settle()
        play.train()
        play.wait(13.0)
    play.calm()
    assert play.run.world is not None
    assert len(play.run.world.rank_map.workers) == workers
    assert [row.notice for row in told(play)] == ([] if asked else ["in place of what was lost"])


# ---- nodes that are taken away


def four_on_two_nodes() -> Play:
    play = observing()
    assert play.ask(m.ResizeRequest(workers=4)).ok
    play.calm()
    assert play.run.handoffs.generation == 1
    return play


def test_a_node_that_is_taken_is_left_by_way_of_the_disk() -> None:
    """As by a job without liver; what would have been done stands beside it."""
    play = four_on_two_nodes()
    warned(play, "w2", LONG_S)
    (row,) = told(play)
    assert (row.target, row.nodes, row.instead) == ("tp1 pp1 dp2", "w2", "to disk")
    assert of(a.Send, play)[-1].message == m.Stop(checkpoint="/checkpoints")  # type: ignore[attr-defined]
    play.settle()
    play.train()
    play.settle()
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.RESTART
    assert "to disk, as policy.observe is set" in play.run.ending.reason
    (notice,) = [row for row in play.watch.notices if row.node == "w2"]
    assert notice.action == "would have gone live to tp1 pp1 dp2; to disk"
    assert notice.outcome == "to disk"


def test_a_node_that_nobody_takes_yet_is_stayed_on() -> None:
    play = four_on_two_nodes()
    warned(play, "w2", None, "drained")
    for _ in range(5):
        play.wait(3.0)
    (row,) = told(play)
    assert (row.nodes, row.instead) == ("w2", "stays as it is")
    assert (play.run.state, layout_of(play)) == (RunState.TRAINING, "tp1 pp1 dp4")
    warned(play, "w2", LONG_S, "drained")
    assert [row.instead for row in told(play)] == ["stays as it is", "to disk"]


@pytest.mark.parametrize(("asked", "workers"), [(False, 2), (True, 4)])
def test_a_restart_has_as_many_workers_as_it_began_with_or_was_asked_for(
    asked: bool, workers: int
) -> None:
    play = four_on_two_nodes() if asked else observing()
    play.feed(e.StopSignalled("test"))  # to disk
    assert play.run.memory.ceiling == (4 if asked else None)
    resumed = e.Resumed("/checkpoints/iter_1", 1, 1, "tp1 pp1 dp2")
    run = play.scene.new_run()
    run.handle(e.CoordinatorStarted(resumed=resumed, memory=play.run.memory), play.now_s)
    for node in play.scene.first:
        run.handle(e.NodeGranted(node), play.now_s)
    run.handle(e.LaunchAllowed(), play.now_s)
    assert run.first_layout.workers == workers


@settings(derandomize=True, database=None, deadline=None, max_examples=25, phases=(Phase.generate,))
@given(st.binary(min_size=300, max_size=600))
def test_whatever_comes_is_answered_and_the_same_again(data: bytes) -> None:
    """Nodes, requests, faults and time in any order; and no handoff is the policy's own idea."""
    play = Play(observed(WIDE_NODES), Choices(data))
    play.begin()
    play.settle()
    storm(play)
    forsaken(play)
    replays(play)
    ideas = [row.notice for row in play.watch.records if "operator" not in row.notice]
    assert not ideas or play.run.elastic.queue.asked is not None


def test_without_the_key_nothing_of_it_is_said() -> None:
    play = Play(TWO_NODES, Choices(b""))
    play.begin()
    play.settle()
    play.grant(burst(3))
    play.hear_pool()
    play.wait(3.0)
    assert not play.run.handoffs.idle
    assert told(play) == []
