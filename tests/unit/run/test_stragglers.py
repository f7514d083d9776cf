"""What the run does about a node that straggles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liver_hpc.config.schema import StragglersSection
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.records import ObservationRecord, StragglerRecord
from tests.unit.run.choices import Choices
from tests.unit.run.endings import replays
from tests.unit.run.play import Play
from tests.unit.run.scenes import SCENES, Scene

TWO_NODES, MACHINE = SCENES[:2]
SLOW = e.NodeStraggles("n2", 2.8, 60.4, worker=1, compared=2)
SAID = "node n2 straggles: forward passes of its worker 1 take 2.8 times as long as the others' for"


def training(scene: Scene = TWO_NODES, **policy: Any) -> Play:
    """Two workers that train on two nodes."""
    section = StragglersSection(drain=policy.pop("drain", False))
    changed = scene.config.policy.model_copy(update={"stragglers": section, **policy})
    config = scene.config.model_copy(update={"policy": changed})
    play = Play(replace(scene, config=config), Choices(b""))
    play.begin()
    play.settle()
    assert play.run.state is RunState.TRAINING
    return play


def notes(actions: list[a.Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, a.Note)]


def rows(play: Play, kind: type[Any]) -> list[Any]:
    done = [action for _, _, actions in play.entries for action in actions]
    return [each.row for each in done if isinstance(each, a.Record) and isinstance(each.row, kind)]


def layout_of(play: Play) -> str:
    assert play.run.world is not None
    return str(play.run.world.rank_map.layout)


def test_it_is_named_and_stays() -> None:
    play = training()
    assert notes(play.feed(SLOW)) == [f"{SAID} 60 s"]
    (row,) = rows(play, StragglerRecord)
    assert (row.node, row.worker, row.ratio, row.for_s) == ("n2", 1, 2.8, 60.4)
    assert (row.generation, row.compared, row.action) == (0, 2, "named alone")
    assert play.run.stragglers.named == {"n2"}
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    assert notes(play.feed(e.NodeKeepsUp("n2", 61.0))) == [
        "node n2 straggles no longer: it has kept up for 61 s"
    ]
    assert play.run.stragglers.named == set()
    replays(play)


def test_with_drain_it_is_left_live_as_an_operator_would_have_it_left() -> None:
    play = training(drain=True)
    actions = play.feed(SLOW)
    assert a.Avoid("n2") in actions
    assert a.Remember(None, ("n2",)) in actions
    assert play.run.comparable_world is None
    (row,) = rows(play, StragglerRecord)
    assert row.action == "drained"
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp1"
    (handoff,) = play.watch.records
    why = "resize to tp1 pp1 dp1 (leaving n2: straggling)"
    assert (handoff.notice, handoff.outcome) == (why, "completed")
    assert play.run.comparable_world is play.run.world
    assert play.run.memory.drained == ("n2",)
    assert play.ask(m.DrainRequest(node="n2", undo=True)).ok
    assert play.run.stragglers.named == set()
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    replays(play)


def test_the_layout_that_it_slowed_down_counts_as_never_trained() -> None:
    """Nor do its steps count until the node is left."""
    play = training(drain=True, layout="auto")
    chooser, dp2 = play.run.elastic.estimates.policy, Layout(1, 1, 2)
    for _ in range(3):
        chooser.observe(dp2, 50.0)
    play.feed(SLOW)
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp1"
    assert chooser.expected_step_s(dp2) < 50.0


def test_it_is_not_drained_where_the_run_would_be_slower_without_it() -> None:
    """One worker takes nearly twice as long as two of which one is 1.8 times as slow."""
    play = training(drain=True)
    _, why = notes(play.feed(replace(SLOW, ratio=1.8)))
    assert why == (
        "node n2 is not drained: without it steps in tp1 pp1 dp1 would take 1.9 times as long"
    )
    (row,) = rows(play, StragglerRecord)
    assert row.action.startswith("not drained: without it ")
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    assert play.run.memory.drained == ()
    replays(play)


def test_it_is_not_drained_where_no_layout_is_allowed_without_it_and_that_is_said() -> None:
    layouts = {2: [*TWO_NODES.config.layout_table[2]]}
    config = TWO_NODES.config.model_copy(update={"layouts": layouts})
    play = training(replace(TWO_NODES, config=config), drain=True)
    said, why = notes(play.feed(SLOW))
    assert said.startswith(SAID)
    assert why.startswith("node n2 is not drained: no layout is allowed without n2; held: ")
    (row,) = rows(play, StragglerRecord)
    assert row.action.startswith("not drained: no layout is allowed")
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    assert play.run.comparable_world is play.run.world
    replays(play)


def test_a_run_that_observes_says_that_it_would_have_drained_it() -> None:
    play = training(drain=True, observe=True)
    assert notes(play.feed(SLOW))[1] == "would have drained node n2: straggling; stays as it is"
    (row,) = rows(play, StragglerRecord)
    assert row.action == "would have drained it"
    (observed,) = rows(play, ObservationRecord)
    assert (observed.notice, observed.nodes) == ("leaving n2: straggling", "n2")
    assert (observed.source, observed.target) == ("tp1 pp1 dp2", "tp1 pp1 dp1")
    assert play.run.snapshot(play.now_s, "", "").observed == 1
    play.calm()
    assert layout_of(play) == "tp1 pp1 dp2"
    assert play.run.memory.drained == ()
    replays(play)


def test_a_node_that_is_not_held_straggles_no_more() -> None:
    play = training()
    assert play.feed(replace(SLOW, node="n9")) == []
    play.feed(SLOW)
    play.withdraw("n2", "preempted")
    play.hear_pool()
    assert play.run.stragglers.named == set()
    assert play.feed(SLOW) == []


def test_nothing_is_compared_while_a_node_of_the_world_is_about_to_be_left() -> None:
    play = training()
    held = play.run.elastic.nodes["n2"]
    held.warning = e.NodeWarned("n2", "drained", play.now_s)
    assert play.run.comparable_world is play.run.world, "it may stay for long"
    held.warning = e.NodeWarned("n2", "preempted", play.now_s, play.now_s + 60.0)
    assert play.run.comparable_world is None


def test_nothing_is_compared_in_a_handoff() -> None:
    play = training(MACHINE)
    assert play.run.comparable_world is play.run.world
    play.ask(m.ResizeRequest(workers=4))
    assert play.run.state is RunState.HANDING_OVER
    assert play.run.comparable_world is None
