"""The run's core, one event at a time: what playing whole runs has found, and what is simplest."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType

import pytest

from liver_hpc.config.schema import ClusterSection, EvalSection, PolicySection, RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import End, Ending
from liver_hpc.run.codec import memory_of
from liver_hpc.run.entries import Entry
from liver_hpc.run.event_clock import EventClock
from liver_hpc.run.events import Node, NodeGone, NodeGranted, NodeWarned
from liver_hpc.run.lifecycle import (
    MOST_READ_S,
    MOST_RESTARTS_IN_VAIN,
    MOST_STARTS_IN_VAIN,
    RunState,
)
from liver_hpc.run.machine import Run
from liver_hpc.run.records import EvaluationRecord, NoticeRecord, RecoveryRecord
from liver_hpc.run.recovery import MOST_ROUNDS
from liver_hpc.run.requests import IN_PLACE
from tests.fakes import Fault, tiny_recipe, tiny_run
from tests.unit.run.choices import Choices
from tests.unit.run.endings import replays
from tests.unit.run.outside import PlayedWorker
from tests.unit.run.play import Play
from tests.unit.run.remembered import remembered
from tests.unit.run.replay import differences
from tests.unit.run.scenes import ANY_NUMBER, DEADLINES, LONGEST_WAIT_S, POLICY, SCENES, burst

TWO_NODES, MACHINE = SCENES[0], SCENES[1]


def training(scene: object = TWO_NODES) -> Play:
    """Two workers that train; whatever is on its way has arrived."""
    play = Play(scene, Choices(b""))  # type: ignore[arg-type]
    play.begin()
    play.settle()
    assert play.run.state is RunState.TRAINING
    return play


def in_boot(scene: object = TWO_NODES) -> Play:
    """A handoff to four workers, whose joiners have not said anything yet."""
    play = training(scene)
    assert play.ask(m.ResizeRequest(workers=4)).ok
    assert play.run.handoffs.attempt is not None
    assert play.run.handoffs.attempt.target is None
    return play


def of(kind: type[a.Action], actions: list[a.Action]) -> list[a.Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_tick_that_does_nothing_leaves_no_trace() -> None:
    """The journal leaves it out, so a core that replays the journal never hears of it."""
    play = training()
    before = remembered(play.run)
    play.now_s += 0.1
    assert play.run.handle(e.Tick(), play.now_s) == []
    assert remembered(play.run) == before


def test_a_run_that_has_ended_ends_no_handoff_any_more() -> None:
    """The deadline of the attempt in which it failed passes, and nothing comes of it."""
    play = in_boot(MACHINE)
    play.feed(e.ShellFailed("worker 0 sent what it may not"))
    assert play.run.state is RunState.ENDED
    told = play.run.snapshot(play.now_s, "", "")
    assert (told.handoffs_aborted, told.handoffs_failed) == (0, 1)
    play.now_s += 1_000.0
    assert not of(a.Record, play.feed(e.Tick()))


OTHER = "worker 2 on h has other code than worker 1 on h: torch is 2.12.0, 2.11.0 there"


def test_a_joiner_of_other_code_is_one_that_has_not_booted() -> None:
    play = Play(MACHINE, Choices(b""))
    play.code = {"torch": "2.11.0", "CUDA": "None"}
    play.begin()
    play.settle()
    for torch, outcome in (("2.12.0", "aborted"), ("2.11.0", "completed")):
        play.code["torch"] = torch
        assert play.ask(m.ResizeRequest(workers=4)).ok
        play.settle()
        play.train()
        play.settle()
        row = play.watch.records[-1]
        assert row.outcome == outcome
        assert (row.detail == f"BOOT: {OTHER}") == (outcome == "aborted"), row.detail
    assert len(play.run.world.rank_map.workers) == 4  # type: ignore[union-attr]
    assert not [*differences(play.journal(), MACHINE.new_run)]


def test_workers_of_a_start_with_other_code_than_each_other_do_not_begin() -> None:
    run = TWO_NODES.new_run()
    events: list[e.Event] = [e.CoordinatorStarted({}, "/checkpoints", None, e.Memory())]
    events += [*map(NodeGranted, TWO_NODES.first), e.LaunchAllowed()]
    actions = [action for event in events for action in run.handle(event, 1.0)]
    (launch,) = of(a.Launch, actions)
    for each in launch.agents:  # type: ignore[attr-defined]
        run.handle(e.AgentMet(each.agent, len(each.seat.slots)), 2.0)
    for worker, digest in enumerate(("0f", "ff")):
        hello = m.Hello(worker=worker, pid=1, host="h", booted_s=2.0, code={"my_model": digest})
        run.handle(hello, 3.0)
    assert run.ending is not None
    assert run.ending.state is Ending.FAILED
    assert run.ending.reason.endswith(": my_model is ff, 0f there")


def test_agents_that_cannot_be_launched_after_the_end_are_not_killed() -> None:
    play = in_boot(MACHINE)
    (agent,) = [name for name, seen in play.watch.agents.items() if not seen.workers]
    play.run.handle(e.ShellFailed("test"), play.now_s)
    play.run.handle(e.LaunchFailed((agent,), (agent,), "no such node"), play.now_s)
    assert agent not in str(play.run.handle(e.Tick(), play.now_s + 1_000.0))


def test_an_agent_that_has_ended_is_not_asked_to_end() -> None:
    play = in_boot(MACHINE)
    (agent,) = [name for name, seen in play.watch.agents.items() if not seen.workers]
    actions = play.run.handle(e.AgentEnded(agent, 87), play.now_s)
    assert of(a.Record, actions), "the attempt is over"
    assert not of(a.EndAgent, actions)


def test_a_node_that_is_gone_takes_the_handoff_onto_it_with_it() -> None:
    """Hellos of its workers may still be on their way: nobody waits for them to be lost."""
    play = training()
    play.grant(burst(3, 2))
    play.hear_pool()
    assert play.ask(m.ResizeRequest(workers=4)).ok
    actions = play.feed(NodeGone("b3", "it is down"))
    (row,) = [each.row for each in of(a.Record, actions) if each.row.generation == 1]  # type: ignore[attr-defined]
    assert (row.outcome, row.detail) == ("aborted", "BOOT: node b3 is gone: it is down")
    assert play.run.state is RunState.TRAINING
    assert not play.run.elastic.estimates.handoffs.measured, "that teaches nothing"


def test_what_is_done_about_a_node_is_said_once() -> None:
    play = training(SCENES[2])
    play.ask(m.ResizeRequest(workers=4))
    play.settle()
    play.train()
    play.settle()
    assert len(play.run.world.rank_map.workers) == 4  # type: ignore[union-attr]
    for window_s in (None, 50.0, 40.0):
        deadline_s = None if window_s is None else play.now_s + window_s
        play.feed(NodeWarned("w2", "preempted", play.now_s, deadline_s))
    play.calm()
    play.feed(NodeGone("w2", "given back"))
    (row,) = [row for row in play.watch.notices if row.node == "w2"]
    assert row.outcome == "in time"
    assert len({*row.action.split("; ")}) == len(row.action.split("; ")), row.action


def test_a_start_remembers_its_drains_in_one_order() -> None:
    """The same whether it is asked or its journal is read."""
    play = training(SCENES[2])
    play.grant(burst(4))
    play.hear_pool()
    for node in ("w2", "b4"):
        assert play.ask(m.DrainRequest(node=node)).ok
    assert play.run.memory.drained == ("b4", "w2")


def test_the_last_word_stands_though_an_earlier_one_was_called_off_for_a_node() -> None:
    """The handoff of the first of three resizes gives way to a node that has to be left."""
    play = training(SCENES[2])
    assert play.ask(m.ResizeRequest(workers=4)).text.startswith("started")
    play.settle()
    assert play.ask(m.ResizeRequest(workers=3)).text.startswith("queued")
    play.feed(NodeWarned("w2", "drained", play.now_s))
    assert play.ask(m.ResizeRequest(workers=1)).text.startswith("merged")
    play.feed(NodeGranted(play.nodes["w2"].node))
    play.calm()
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 1


def test_what_is_refused_bounds_nothing() -> None:
    play = training()
    assert not play.ask(m.ResizeRequest(workers=3)).ok
    assert play.run.memory.ceiling is None
    for number in (3, 4):
        play.grant(burst(number))
    play.calm(LONGEST_WAIT_S)
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 4


@pytest.mark.parametrize("more", [(), (Node("n3", "main", 1),)])
def test_drains_in_quick_succession_leave_a_layout(more: tuple[Node, ...]) -> None:
    """What a handoff is leaving is not counted on; what it goes to is, though nobody is there."""
    play = training()
    for node in more:
        play.grant(node)
        play.hear_pool()
    *drained, last = (name for name in play.nodes)
    for name in drained:
        assert play.ask(m.DrainRequest(node=name)).ok
    assert play.run.state is RunState.HANDING_OVER
    answer = play.ask(m.DrainRequest(node=last))
    assert not answer.ok
    assert answer.text.startswith(f"no layout is allowed without {last}; held: ")
    play.calm()
    assert play.run.state is RunState.TRAINING
    assert play.run.memory.drained == (*drained,)
    assert play.run.world is not None
    assert [*map(play.run.agents.node_of, play.run.world.rank_map.workers)] == [last]


@pytest.mark.parametrize("early", [True, False])
def test_a_layout_that_waits_for_burst_nodes_is_the_one_that_it_becomes(early: bool) -> None:
    """And not the one of as many workers that is preferred; also where it had to wait for the start
    of the run first."""
    config = SCENES[3].config.model_copy(update={"layouts": TWO_NODES.config.layouts})
    play = Play(replace(SCENES[3], config=config), Choices(b""))
    play.begin()
    if not early:
        play.settle()
    answer = play.ask(m.ResizeRequest(layout="tp=2,dp=2"))
    assert answer.text.startswith("queued" if early else "waits for burst nodes")
    play.settle()
    assert play.run.snapshot(play.now_s, "", "").queued == ("resize to tp2 pp1 dp2 (operator)",)
    for node in (burst(3), burst(4), burst(5)):
        play.grant(node)
        play.settle()
    play.calm(LONGEST_WAIT_S)
    assert play.run.world is not None
    assert str(play.run.world.rank_map.layout) == "tp2 pp1 dp2"
    assert [row.notice for row in play.watch.records] == ["resize to tp2 pp1 dp2 (operator)"]
    assert not play.run.elastic.queue.not_granted
    assert not [*differences(play.journal(), play.scene.new_run)]


def test_a_layout_does_not_wait_for_burst_nodes_that_nobody_asks_for() -> None:
    """What waits is dropped, and what is asked for later is refused."""
    play, reason = training(SCENES[3]), "2.00 of 2 node hours are used"
    assert play.ask(m.ResizeRequest(layout="tp=2,dp=2")).text.startswith("waits for burst nodes")
    play.feed(e.BurstOver(reason))
    play.settle()
    assert play.run.snapshot(play.now_s, "", "").queued == ()
    answer = play.ask(m.ResizeRequest(layout="tp=2,dp=2"))
    assert not answer.ok
    assert answer.text.endswith(f"no burst nodes: {reason}")
    assert not [*differences(play.journal(), play.scene.new_run)]


def test_whoever_asks_later_does_not_wait_for_burst_nodes_of_before() -> None:
    play = training(SCENES[3])
    assert play.ask(m.ResizeRequest(layout="tp=2,dp=2")).text.startswith("waits for burst nodes")
    play.grant(burst(3))
    play.hear_pool()
    assert play.ask(m.ResizeRequest(workers=2)).text.startswith("started")
    play.settle()
    for node in (burst(4), burst(5)):
        play.grant(node)
    play.calm(LONGEST_WAIT_S)
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 2


@pytest.mark.parametrize("journal", [True, False])
def test_a_layout_that_waits_is_withdrawn_by_whoever_asks_for_the_present_one(
    journal: bool,
) -> None:
    """Whether it waits for burst nodes or for its turn; and then the run does not grow either."""
    config = SCENES[3].config.model_copy(update={"layouts": TWO_NODES.config.layouts})
    play = training(replace(SCENES[3], config=config))
    if not journal:
        for node in (burst(3), burst(4, 2)):
            play.feed(NodeGranted(node))
        play.feed(e.JournalFailed("the disk is full"))
    assert play.ask(m.ResizeRequest(layout="tp=2,dp=2")).ok
    answer = play.ask(m.ResizeRequest(workers=1))
    assert answer.ok
    assert answer.text == (
        "stays in tp1 pp1 dp1; resize to tp2 pp1 dp2 (operator) is withdrawn; "
        "the run grows no further by itself"
    )
    assert play.run.snapshot(play.now_s, "", "").queued == ()
    assert play.run.memory.ceiling == 1
    wanted = [each for _, _, done in play.entries for each in of(a.WantWorkers, done)]
    assert wanted[-1] == a.WantWorkers(0)
    if not journal:
        play.feed(e.JournalFailed(""))
    for node in (burst(3), burst(4), burst(5)):
        play.grant(node)
    play.calm(LONGEST_WAIT_S)
    assert play.run.world is not None
    assert str(play.run.world.rank_map.layout) == "tp1 pp1 dp1"
    assert not play.watch.records


def test_who_asks_for_the_present_layout_bounds_growth_once() -> None:
    play = training()
    answer = play.ask(m.ResizeRequest(workers=2))
    assert answer.ok
    assert answer.text == "stays in tp1 pp1 dp2; the run grows no further by itself"
    answer = play.ask(m.ResizeRequest(workers=2))
    assert (answer.ok, answer.text) == (False, "the run already has layout tp1 pp1 dp2")


def test_burst_nodes_are_asked_for_though_fewer_workers_are_faster() -> None:
    """For a layout that somebody asked for, and they are kept until all have come."""
    policy = PolicySection(**{**POLICY, "layout": "auto"})
    workers = SCENES[3].config.workers.model_copy(update={"initial": 2})
    layouts = TWO_NODES.config.layouts
    config = SCENES[3].config.model_copy(
        update={"policy": policy, "workers": workers, "layouts": layouts}
    )
    play = training(replace(SCENES[3], config=config, first=TWO_NODES.first))
    for layout, step_s in (("dp=2", 1.0), ("dp=4", 1.1), ("tp=2,dp=2", 1.2), ("dp=3", 1.3)):
        for _ in range(16):
            play.run.elastic.estimates.policy.observe(Layout.parse(layout), step_s)
    play.calm(2 * policy.retry_s)
    actions = play.feed(e.OperatorAsked(1, m.ResizeRequest(workers=4)))
    assert of(a.WantWorkers, actions) == [a.WantWorkers(2)]
    for node in (burst(3), burst(4)):
        play.grant(node)
        play.settle()
        play.wait(2 * policy.retry_s)
    play.calm()
    assert play.run.world is not None
    assert str(play.run.world.rank_map.layout) == "tp1 pp1 dp4"


@pytest.mark.parametrize("min_nodes", [0, 1])
def test_burst_nodes_that_are_wanted_anyway_are_not_given_back(min_nodes: int) -> None:
    """They would be asked for again at once."""
    scene = next(scene for scene in SCENES if scene.name == "wide nodes")
    slurm = scene.config.cluster.slurm
    assert slurm.burst is not None
    section = slurm.burst.model_copy(update={"min_nodes": min_nodes})
    cluster = scene.config.cluster.model_copy(
        update={"slurm": slurm.model_copy(update={"burst": section})}
    )
    config = scene.config.model_copy(update={"cluster": cluster})
    play = training(replace(scene, config=config))
    for number in (3, 4):
        play.grant(burst(number, 2))
    play.calm(3 * config.policy.retry_s)
    gives = (each for _, _, done in play.entries for each in of(a.GiveBack, done))
    assert len({give.node for give in gives}) == 2 - min_nodes  # type: ignore[attr-defined]


# ---- the simplest of what may happen


def test_the_first_world_begins_once_all_workers_are_there() -> None:
    play = training()
    assert play.run.world is not None
    assert play.run.world.rank_map.workers == (0, 1)
    play.train()
    play.settle()
    assert play.run.recorder.steps_done == 1


def test_a_resize_is_granted_and_the_new_world_trains() -> None:
    play = training(MACHINE)
    answer = play.ask(m.ResizeRequest(workers=4))
    assert answer.text == "started: resize to tp2 pp1 dp2 (operator)"
    play.calm()
    assert play.run.world is not None
    assert (play.run.world.generation, play.run.world.rank_map.layout.workers) == (1, 4)
    assert [row.outcome for row in play.watch.records] == ["completed"]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_signal_to_a_local_run_is_a_stop_with_a_checkpoint_where_it_says_so(
    checkpoint: bool,
) -> None:
    play = training(MACHINE)
    (stop,) = of(a.Send, play.feed(e.StopSignalled("test", checkpoint)))
    assert isinstance(stop, a.Send)
    assert stop.message == m.Stop(checkpoint="/checkpoints" if checkpoint else None)


def test_a_node_that_cannot_be_left_in_time_sends_the_state_to_disk() -> None:
    play = training(SCENES[5])
    actions = play.feed(NodeWarned("n2", "preempted", play.now_s, play.now_s + 100.0))
    (stop,) = of(a.Send, actions)
    assert isinstance(stop, a.Send)
    assert stop.message == m.Stop(checkpoint="/checkpoints")
    play.settle()
    play.train()
    play.settle()
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.RESTART


def test_a_node_with_a_deadline_is_left_for_one_that_nobody_takes_yet() -> None:
    """Slurm drains all nodes; then one of them is preempted."""
    scene = SCENES[2]
    workers = scene.config.workers.model_copy(update={"initial": 4})
    config = scene.config.model_copy(update={"workers": workers})
    play = training(replace(scene, config=config))
    for name in ("w1", "w2"):
        play.feed(NodeWarned(name, "drained", play.now_s))
    play.calm()
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 4
    play.feed(NodeWarned("w2", "preempted", play.now_s, play.now_s + 60.0))
    play.calm()
    assert play.run.state is RunState.TRAINING
    assert [*map(play.run.agents.node_of, play.run.world.rank_map.workers)] == ["w1", "w1"]
    assert play.watch.records[-1].notice.endswith("(leaving w2: preempted)")


def test_a_worker_that_says_what_nobody_asked_for_ends_the_run_with_the_story() -> None:
    play = in_boot(MACHINE)
    play.rogue = True
    play.feed(m.Vote(worker=0, generation=1, ok=True))
    assert play.run.ending is not None
    assert "unexpected Vote in phase BOOT; events so far: " in play.run.ending.reason


def test_no_handoff_begins_while_the_journal_cannot_be_written() -> None:
    play = in_boot(MACHINE)
    actions = play.feed(e.JournalFailed("the disk is full"))
    assert play.run.handoffs.idle
    assert "the journal cannot be written: the disk is full" in str(actions)
    assert play.ask(m.ResizeRequest(workers=4)).ok
    play.settle()
    assert play.run.handoffs.idle
    play.feed(e.JournalFailed(""))
    assert not play.run.handoffs.idle


def test_what_was_asked_for_comes_again_once_the_disk_takes_the_journal() -> None:
    """Its handoff was called off for that, and has not failed."""
    play = training(TWO_NODES)
    assert play.ask(m.ResizeRequest(workers=1)).ok
    assert play.run.handoffs.attempt is not None
    play.feed(e.JournalFailed("the disk is full"))
    for _ in range(2):
        play.settle()
        play.train()
    assert play.run.handoffs.idle
    play.feed(e.JournalFailed(""))
    for _ in range(3):
        play.settle()
        play.train()
    play.settle()
    assert [row.outcome for row in play.watch.records] == ["aborted", "completed"]
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 1


@pytest.mark.parametrize("lost", [0, 1, 2], ids=["never", "once", "again"])
def test_what_was_asked_for_has_one_more_turn_where_a_coordinator_was_lost_in_its_handoff(
    lost: int,
) -> None:
    """Its store and its rendezvous are gone, for which workers fail."""
    play = training(MACHINE)
    fails = (Phase.TRANSFER, Fault.VOTE_NO)
    play.faults.planned = [fails]
    assert play.ask(m.ResizeRequest(workers=4)).ok
    losses: set[int] = set()
    for _ in range(6):
        play.settle()
        generation = play.run.handoffs.generation
        if len(losses) < lost and generation not in losses:
            losses.add(generation)
            play.faults.planned = [fails]
            play.feed(e.TookOver(generation, 7, "h"))
            play.feed(e.Regained())
        play.train()
    play.settle()
    outcomes = [row.outcome for row in play.watch.records]
    assert outcomes == [["aborted"], ["aborted", "completed"], ["aborted"] * 2][lost]
    assert play.run.handoffs.idle
    assert not play.run.elastic.queue.waiting
    assert not [*differences(play.journal(), play.scene.new_run)]


def test_a_run_that_is_to_stop_asks_for_nothing_again() -> None:
    play = training(MACHINE)
    assert play.ask(m.ResizeRequest(workers=4)).ok
    play.feed(e.TookOver(2, 7, "h"))
    play.feed(e.Regained())
    assert play.ask(m.StopRequest()).ok
    play.settle()
    assert not play.run.elastic.queue.waiting


def test_what_kept_a_lost_coordinators_journal_from_being_written_is_forgotten_with_it() -> None:
    """The next one has a journal of its own, and says itself where that cannot be written."""
    play = training(MACHINE)
    play.feed(e.JournalFailed("the disk is full"))
    play.feed(e.TookOver(2, 7, "h"))
    play.feed(e.Regained())
    assert play.ask(m.ResizeRequest(workers=4)).ok
    assert not play.run.handoffs.idle
    assert not [*differences(play.journal(), play.scene.new_run)]


def test_a_joiner_that_fails_costs_the_attempt_alone() -> None:
    play = training(MACHINE)
    play.faults.planned.append((Phase.TRANSFER, Fault.VOTE_NO))
    play.ask(m.ResizeRequest(workers=4))
    play.settle()
    play.train()
    play.settle()
    assert [row.outcome for row in play.watch.records] == ["aborted"]
    assert play.run.state is RunState.TRAINING


def test_nodes_that_come_are_grown_onto_in_order() -> None:
    play = training(SCENES[2])
    for node in (burst(3, 2), burst(4)):
        play.feed(NodeGranted(node))
    assert play.run.handoffs.idle, "more may come"
    play.now_s += 5.0
    launched = of(a.Launch, play.run.handle(e.Tick(), play.now_s))
    assert "w2" in str(launched), "what lasts longer is filled first"


def test_growing_that_does_not_repay_is_declined_in_words_and_looked_at_again() -> None:
    """Ever later; what comes of it is the same where the journal is read."""
    policy = {**POLICY, "layout": "auto", "horizon_s": 0.001}
    play = training(replace(SCENES[2], config=SCENES[2].config.model_copy(
        update={"policy": PolicySection(**policy)})))  # fmt: skip
    play.feed(NodeGranted(burst(3, 2)))
    told: list[tuple[float, str]] = []
    began_s = play.now_s
    while play.now_s < began_s + 40.0:
        play.now_s += 0.5
        before = remembered(play.run)
        actions = play.run.handle(e.Tick(), play.now_s)
        assert actions or remembered(play.run) == before
        told += [(play.now_s - began_s, note.text) for note in of(a.Note, actions)]
    assert play.run.handoffs.idle
    assert [round(at_s) for at_s, _ in told] == [2, 4, 8, 16, 32]
    (text,) = {text for _, text in told}
    assert text.startswith("stays in tp1 pp1 dp2: to tp1 pp1 dp4, it saves ")


def test_burst_nodes_that_come_too_late_to_repay_go_back_and_are_not_asked_for_again() -> None:
    """The run ends before they would be of use; what is asked for later wants them."""
    config = SCENES[3].config
    policy = PolicySection(**{**POLICY, "layout": "auto"})
    train = config.train.model_copy(update={"steps": 2})
    play = training(
        replace(SCENES[3], config=config.model_copy(update={"policy": policy, "train": train}))
    )
    for node in (burst(3), burst(4)):
        play.feed(NodeGranted(node))
    for _ in range(40):
        play.now_s += 0.5
        play.feed(e.Tick())
    told = [note.text for _, _, done in play.entries for note in of(a.Note, done)]
    assert any("it saves nothing" in text for text in told), told
    gives = [give for _, _, done in play.entries for give in of(a.GiveBack, done)]
    assert {give.node for give in gives} == {"b3", "b4"}  # type: ignore[attr-defined]
    wanted = [each for _, _, done in play.entries for each in of(a.WantWorkers, done)]
    assert wanted[-1] == a.WantWorkers(0)
    actions = play.feed(e.OperatorAsked(1, m.ResizeRequest(workers=4)))
    assert of(a.WantWorkers, actions) == [a.WantWorkers(3)]
    assert not [*differences(play.journal(), play.scene.new_run)]


def test_schedules_are_the_same_again() -> None:
    """What shrinks a schedule that fails, and what finds it again."""
    from tests.unit.run.endings import schedule

    data = random.Random(5).randbytes(120)
    assert repr(schedule(data).entries) == repr(schedule(data).entries)


# ---- a start with too few nodes

RESUMED = e.Resumed("/checkpoints/step-5", 5, 3, "tp1 pp1 dp2")


def on_one_node(
    resumed: e.Resumed | None = RESUMED, burst: int = 0, in_vain: int = 0, **slurm: object
) -> Play:
    """A start that finds one of two nodes, of which each layout wants both; burst: its max_nodes"""
    (scene,) = (scene for scene in SCENES if scene.name == "nowhere to go")
    burst_section = {"partition": "burst", "max_nodes": burst} if burst else None
    cluster = {"kind": "slurm", "slurm": {"burst": burst_section, **slurm}}
    config = scene.config.model_copy(update={"cluster": ClusterSection.model_validate(cluster)})
    play = Play(replace(scene, config=config, first=scene.first[:1]), Choices(b""))
    play._start(resumed, e.Memory(in_vain=in_vain), play.scene.first)
    return play


def wait_for_nodes(play: Play) -> None:
    """As long as a launch takes at most, in ticks."""
    for _ in range(5):
        play.wait(DEADLINES["boot_s"] / 5)


@pytest.mark.parametrize(
    ("resumed", "requeue", "ending", "wanted"),
    [
        (RESUMED, True, Ending.REQUEUE, "tp1 pp1 dp2, tp2 pp1 dp1"),
        (RESUMED, False, Ending.FAILED, "tp1 pp1 dp2, tp2 pp1 dp1"),
        (None, True, Ending.FAILED, "tp1 pp1 dp2"),
    ],
)
def test_a_start_with_nodes_for_no_layout_ends_where_no_more_can_come(
    resumed: e.Resumed | None, requeue: bool, ending: Ending, wanted: str
) -> None:
    """They would stand idle until their job's time is up."""
    play = on_one_node(resumed, requeue=requeue)
    play.wait(DEADLINES["boot_s"] - 1.0)
    assert play.run.ending is None
    play.wait(1.0)
    assert play.run.ending is not None
    assert play.run.ending.state is ending
    assert play.run.ending.reason == (
        f"no nodes for {wanted}, and none to come that are enough; held: "
        "n1 (main): 0 of 1 slots taken"
    )
    replays(play)


def test_starts_with_too_few_nodes_are_not_queued_again_for_ever() -> None:
    """Each held its nodes for a launch's time, for nothing, and none came further."""
    journal: list[Entry] = []
    ends: list[End] = []
    for _ in range(MOST_STARTS_IN_VAIN):
        play = on_one_node(in_vain=memory_of(journal).in_vain)
        wait_for_nodes(play)
        journal += play.journal()
        assert play.run.ending is not None
        ends.append(play.run.ending)
    assert [each.state for each in ends] == [*[Ending.REQUEUE] * 2, Ending.FAILED]
    assert f"{MOST_STARTS_IN_VAIN} times in a row" in ends[-1].reason
    assert memory_of(journal).in_vain == 0, "who begins the run again has mended something"


def test_a_start_with_nodes_enough_ends_those_in_vain() -> None:
    play = on_one_node(burst=1, in_vain=MOST_STARTS_IN_VAIN - 1)
    play.grant(burst(3))
    play.settle()
    assert play.run.memory.in_vain == 0


def test_a_start_with_nodes_for_no_layout_waits_for_burst_nodes() -> None:
    play = on_one_node(burst=1)
    wait_for_nodes(play)
    assert play.run.ending is None
    play.grant(burst(3))
    play.settle()
    assert play.run.state is RunState.TRAINING


def test_a_start_does_not_wait_for_burst_nodes_that_nobody_asks_for_any_more() -> None:
    """Nor is it queued again for them for ever."""
    ends: list[End] = []
    for in_vain in range(MOST_STARTS_IN_VAIN):
        play = on_one_node(burst=1, in_vain=in_vain)
        play.feed(e.BurstOver("2.00 of 2 node hours are used"))
        wait_for_nodes(play)
        replays(play)
        assert play.run.ending is not None
        ends.append(play.run.ending)
    assert [each.state for each in ends] == [*[Ending.REQUEUE] * 2, Ending.FAILED]
    assert "no burst nodes: 2.00 of 2 node hours are used; held: n1" in ends[-1].reason


def test_burst_nodes_may_come_again_after_a_take_over_until_its_pool_says_no() -> None:
    play = on_one_node(burst=1)
    play.feed(e.BurstOver("the disk is full"))
    play.feed(e.TookOver(2, 7, "h"))
    play.feed(e.Regained())
    wait_for_nodes(play)
    assert play.run.ending is None
    play.feed(e.BurstOver("the disk is full"))
    wait_for_nodes(play)
    assert play.run.ending is not None


def test_burst_nodes_that_are_not_enough_are_not_waited_for() -> None:
    play = on_one_node(burst=1)
    play.withdraw("n1", "it is down")
    play.hear_pool()
    wait_for_nodes(play)
    assert play.run.ending is not None
    assert play.run.ending.reason.endswith("held: no node is held")


def test_a_start_waits_on_while_nodes_come() -> None:
    play = on_one_node(resumed=None)
    play.wait(DEADLINES["boot_s"] - 1.0)
    play.withdraw("n1", "it is down")
    play.hear_pool()
    play.grant(play.scene.first[0])
    play.hear_pool()
    play.wait(DEADLINES["boot_s"] - 1.0)
    assert play.run.ending is None
    play.grant(TWO_NODES.first[1])
    play.settle()
    assert play.run.state is RunState.TRAINING


# ---- evaluation


def begun(memory: e.Memory, step: int = 5, weights: bool = False) -> tuple[Run, m.Begin]:
    """A run that is evaluated every 5 steps, and goes on from a checkpoint, or takes its weights;
    what it tells its workers first."""
    config = TWO_NODES.config.model_copy(update={"eval": EvalSection(every_steps=5, steps=2)})
    run = replace(TWO_NODES, config=config).new_run()
    resumed = e.Resumed(f"/checkpoints/step-{step}", step, 3, "tp1 pp1 dp2", weights)
    events: list[e.Event] = [e.CoordinatorStarted({}, "/checkpoints", resumed, memory)]
    events += [NodeGranted(node) for node in TWO_NODES.first]
    events.append(e.LaunchAllowed())
    actions = [action for event in events for action in run.handle(event, 1.0)]
    (launch,) = of(a.Launch, actions)
    for each in launch.agents:  # type: ignore[attr-defined]
        actions += run.handle(e.AgentMet(each.agent, len(each.seat.slots)), 2.0)
    workers = [w for each in of(a.Admit, actions) for w in each.workers]  # type: ignore[attr-defined]
    for worker in workers:
        actions += run.handle(m.Hello(worker=worker, pid=1, host="h", booted_s=2.0), 3.0)
    told = [each.message for each in of(a.Send, actions)]  # type: ignore[attr-defined]
    (begin,) = [message for message in told if isinstance(message, m.Begin)]
    return run, begin


def test_a_run_that_takes_weights_begins_as_a_new_one() -> None:
    run, begin = begun(e.Memory(), 0, weights=True)
    assert (begin.checkpoint, begin.weights) == ("/checkpoints/step-0", True)
    assert not begin.evaluate
    shown = run.snapshot(4.0, "", "")
    assert shown.step == 0
    _, begin = begun(e.Memory(4), 5)
    assert not begin.weights


@pytest.mark.parametrize(
    ("memory", "step", "owes"),
    [
        (e.Memory(4), 5, True),  # the run was stopped at that boundary
        (e.Memory(4, evaluated=5), 5, False),
        (e.Memory(4, evaluated=10), 5, False),  # steps are done again, but that boundary is not
        (e.Memory(4, evaluated=5), 7, False),
        (e.Memory(4, evaluated=5), 10, True),
        (e.Memory(), 5, False),  # another run's checkpoint
    ],
)
def test_an_evaluation_is_made_up_for_that_the_start_before_did_not_do(
    memory: e.Memory, step: int, owes: bool
) -> None:
    _, begin = begun(memory, step)
    assert begin.evaluate is owes


def test_a_start_waits_for_its_checkpoint_to_be_read_as_long_as_the_run_file_says() -> None:
    run, _ = begun(e.Memory(4))
    limits = run.config.limits
    late_s = 4.0 + limits.prepare_s + limits.checkpoint_s
    assert not of(End, run.handle(e.Tick(), late_s - 2.0))
    (end,) = of(End, run.handle(e.Tick(), late_s + 1.0))
    assert "for Restored of workers" in end.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("earlier", [None, 7])
def test_a_run_whose_last_checkpoint_failed_is_not_finished(earlier: int | None) -> None:
    run, begin = begun(e.Memory(), 5)
    run.handle(e.StateRestored(begin.generation), 4.0)
    steps, why = run.config.train.steps, "Disk quota exceeded"
    if earlier is None:
        run._checkpointed = None
    else:
        run.handle(e.CheckpointWritten(earlier, "/checkpoints/step-7", 8, 1.0, 8), 4.5)
    run.handle(e.CheckpointFailed(steps, why), 5.0)
    status = run.snapshot(5.0, "", "")
    assert (status.checkpointed, status.checkpoint_error) == (earlier, why)
    for worker in begin.rank_map.rank_map().workers:
        run.handle(m.Finished(worker=worker, step=steps), 6.0)
    assert run.ending is not None
    assert run.ending.state is (Ending.FAILED if earlier is None else Ending.RESTART)
    assert f"{why}; " in run.ending.reason


def test_the_last_checkpoint_is_waited_for_as_long_as_the_run_file_says() -> None:
    """A worker that has written its part has done its last step; others write for longer."""
    run, begin = begun(e.Memory(), 5)
    first, *_ = begin.rank_map.rank_map().workers
    run.handle(e.StateRestored(begin.generation), 4.0)
    run.handle(m.Finished(worker=first, step=run.config.train.steps), 5.0)
    limits = run.config.limits
    late_s = 5.0 + limits.boundary_s + limits.checkpoint_s
    assert not of(End, run.handle(e.Tick(), late_s - 1.0))
    assert of(End, run.handle(e.Tick(), late_s + 1.0))


@pytest.mark.parametrize("told", ["one cannot read it", "digests differ", "nobody says"])
def test_a_start_waits_until_it_is_known_whether_its_checkpoint_is_damaged(told: str) -> None:
    """A large one is read for longer than workers would be waited for."""
    run, begin = begun(e.Memory(4))
    first, *_ = workers = begin.rank_map.rank_map().workers
    lost, late_s = e.WorkerGone(first, "exit code 0"), 400.0
    doubt: e.Event = e.CheckpointDoubted("exp_avg differs")
    if told == "one cannot read it":
        doubt = m.NotRestored(worker=first, generation=begin.generation, reason="truncated")
    actions = run.handle(doubt, 4.0)
    (send,) = of(a.Send, actions)
    assert send.workers == workers  # type: ignore[attr-defined]
    assert isinstance(send.message, m.Exit)  # type: ignore[attr-defined]
    (note,) = of(a.Note, actions)
    assert note.text.startswith("reading all files of /checkpoints/step-5: ")  # type: ignore[attr-defined]
    for at_s, event in ((5.0, lost), (late_s, e.Tick()), (late_s, NodeGone("n2", "it is down"))):
        assert not of(End, run.handle(event, at_s))
    if told == "nobody says":
        (end,) = of(End, run.handle(e.Tick(), 4.0 + MOST_READ_S + 1.0))
        why = "waited 21600 s for all files of /checkpoints/step-5 to be read"
    else:
        why = "it is now damaged-step-5"
        (end,) = of(End, run.handle(e.CheckpointDamaged(why), late_s + 1.0))
    assert (end.state, end.reason) == (Ending.RESTART, why)  # type: ignore[attr-defined]


# ---- restarts in vain


def that_trains(memory: e.Memory, step: int, done: int) -> Run:
    """It goes on from the checkpoint of a step, and has come to another one."""
    run, begin = begun(memory, step)
    run.handle(e.StateRestored(begin.generation), 4.0)
    worker = begin.rank_map.rank_map().workers[0]
    run.handle(
        m.StepDone(
            worker=worker, generation=begin.generation, step=done - 1, loss=1.0, grad_norm=1.0,
            learning_rate=1.0, tokens=1, started_s=4.0, ended_s=5.0,
        ),
        5.0,
    )  # fmt: skip
    return run


def ends_of_restarts(*starts: tuple[int, int | None]) -> list[End]:
    """How each start ends that loses a worker once it is at a step, and has written a checkpoint,
    where one is given, from which the next one goes on."""
    ends, memory, step = list[End](), e.Memory(), 5
    for done, saved in starts:
        run = that_trains(memory, step, done)
        if saved is not None:
            step = saved
            run.handle(e.CheckpointWritten(step, f"/checkpoints/step-{step}", 8, 1.0, 8), 6.0)
        assert run.world is not None
        actions = run.handle(e.WorkerGone(run.world.rank_map.workers[0], "exit code 1"), 7.0)
        (end,) = of(End, actions)
        assert isinstance(end, End)
        rows = [each.row for each in of(a.Record, actions)]  # type: ignore[attr-defined]
        kinds = [row.kind for row in rows if isinstance(row, NoticeRecord)]
        assert kinds.count("restart") == (end.state is Ending.RESTART)
        ends.append(end)
        memory = run.memory
    return ends


def test_a_restart_with_a_newer_checkpoint_is_not_in_vain() -> None:
    """Although a restart before it had come further."""
    ends = ends_of_restarts((100, 10), *((20 + n, 20 + n) for n in range(5)))
    assert {each.state for each in ends} == {Ending.RESTART}


def test_restarts_from_one_and_the_same_checkpoint_end_the_run() -> None:
    """Who reads the journal is told so, and of no start that there never was."""
    *before, last = ends_of_restarts((12, 10), *[(14, None)] * (1 + MOST_RESTARTS_IN_VAIN))
    assert {each.state for each in before} == {Ending.RESTART}
    assert (last.state, last.step) == (Ending.FAILED, 14)
    assert last.reason.startswith("restarted 3 times in vain: worker ")


@pytest.mark.parametrize("again", [False, True])
def test_a_start_that_finds_its_checkpoint_damaged_is_in_vain_where_it_is_tried_again(
    again: bool,
) -> None:
    run, _ = begun(e.Memory(4, vain_restarts=MOST_RESTARTS_IN_VAIN - 1, furthest=14))
    run.handle(e.CheckpointDoubted("exp_avg differs"), 4.0)
    (end,) = of(End, run.handle(e.CheckpointDamaged("it is now damaged", again), 5.0))
    assert end.state is (Ending.FAILED if again else Ending.RESTART)  # type: ignore[attr-defined]
    assert run.memory.vain_restarts == (MOST_RESTARTS_IN_VAIN if again else 0)
    assert run.memory.furthest == 14


# ---- evaluations, and copies that differ


def test_an_evaluation_is_recorded_shown_and_remembered() -> None:
    run, _ = begun(e.Memory(4, evaluated=5), 7)
    workers = run.world.rank_map.workers  # type: ignore[union-attr]
    generation = run.world.generation  # type: ignore[union-attr]
    run.handle(e.StateRestored(generation), 4.0)
    done = m.Evaluated(
        worker=workers[0], generation=generation, step=10, loss=2.5, batches=2, started_s=5.0,
        ended_s=6.0,
    )  # fmt: skip
    (record,) = of(a.Record, run.handle(done, 6.0))
    assert record.row == EvaluationRecord(10, generation, 2.5, 2, 5.0, 6.0)  # type: ignore[attr-defined]
    shown = run.snapshot(7.0, "", "")
    assert (shown.validation_loss, shown.evaluated) == (2.5, 10)
    assert run.memory.evaluated == 10


def test_a_run_whose_copies_differ_goes_back_to_its_checkpoint_and_says_which_differ() -> None:
    run, _ = begun(e.Memory(4, evaluated=5), 7)
    workers = run.world.rank_map.workers  # type: ignore[union-attr]
    generation = run.world.generation  # type: ignore[union-attr]
    run.handle(e.StateRestored(generation), 4.0)
    for number, worker in enumerate(workers):
        digest = m.ClassDigest(
            kind="parameter", tp_replicated=True, multi_stage=False, value=f"{number:016x}"
        )
        assert run.ending is None
        told = m.Verified(worker=worker, generation=generation, step=10, digests=(digest,))
        run.handle(told, 6.0)
    assert run.ending is not None
    assert "copies of the state differ after step 10: parameter" in run.ending.reason


# ---- a world that loses a worker


def that_recovers(name: str = "snapshots", **policy: float) -> Play:
    """Two workers that have trained, and hold snapshots."""
    scene = next(scene for scene in SCENES if scene.name == name)
    policies = scene.config.policy.model_copy(update=policy)
    each_step = scene.config.snapshots.model_copy(update={"every_steps": 1})
    config = scene.config.model_copy(update={"policy": policies, "snapshots": each_step})
    play = training(replace(scene, config=config))
    for _ in range(3):
        play.train()
        play.settle()
    return play


def goes_on_until(play: Play, reached: Callable[[], bool]) -> None:
    for _ in range(300):
        if not reached() and not play.go_on(draw=False):
            play.train()
    assert reached()


def lose(play: Play, worker: int) -> list[a.Action]:
    play.workers[worker].dead = True
    return play.feed(e.WorkerGone(worker, "signal 9"))


def recoveries(play: Play) -> list[RecoveryRecord]:
    rows = [each.row for _, _, done in play.entries for each in of(a.Record, done)]  # type: ignore[attr-defined]
    return [row for row in rows if isinstance(row, RecoveryRecord)]


def test_a_lost_worker_costs_a_step_and_the_others_go_on() -> None:
    play = that_recovers()
    actions = lose(play, 1)
    assert play.run.state is RunState.RECOVERING
    (halt,) = [each for each in of(a.Send, actions) if isinstance(each.message, m.Halt)]  # type: ignore[attr-defined]
    assert halt.workers == (0,)  # type: ignore[attr-defined]
    play.settle()
    assert play.run.state is RunState.TRAINING
    (row,) = recoveries(play)
    assert (row.lost, row.source, row.target) == ("1", "tp1 pp1 dp2", "tp1 pp1 dp1")
    assert (row.step, row.steps_redone, row.rounds) == (2, 1, 1)


@pytest.mark.parametrize(
    ("every", "written", "owed"),
    [(2, False, True), (2, True, False), (3, False, False), ("auto", False, False)],
)
def test_a_checkpoint_that_is_due_where_it_goes_back_to_is_owed(
    every: int | str, written: bool, owed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = that_recovers()
    config = play.run.config
    checkpoint = config.checkpoint.model_copy(update={"every_steps": every})
    config = config.model_copy(update={"checkpoint": checkpoint})
    monkeypatch.setattr(play.run.recoveries, "_config", config)
    if written:
        play.feed(e.CheckpointWritten(2, "/checkpoints/2", 1, 1.0, total_bytes=1))
    lose(play, 1)
    play.settle()
    sent = [each for _, _, done in play.entries for each in of(a.Send, done)]  # type: ignore[attr-defined]
    (refill,) = [each.message for each in sent if isinstance(each.message, m.Refill)]
    assert (refill.scalars.step, refill.save) == (2, owed)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_node_with_a_short_window_is_left_live_once_there_is_a_snapshot(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it goes before that is done, its worker is a lost one."""
    play = that_has_replaced()
    handoffs = play.run.elastic.estimates.handoffs
    monkeypatch.setattr(handoffs, "checkpoint_s", lambda _rank_map: 0.0)
    monkeypatch.setattr(handoffs, "restart_s", lambda _rank_map: 100.0)
    monkeypatch.setattr(handoffs, "estimate_s", lambda *_of: 100.0)
    for _ in range(steps):
        play.train()
        play.settle()
    node = play.run.agents.node_of(2)
    play.feed(NodeWarned(node, "preempted", play.now_s, play.now_s + 5.0))
    assert play.run.state is (RunState.HANDING_OVER if steps else RunState.STOPPING)
    if not steps:
        return
    lose(play, 2)
    play.feed(NodeGone(node, "preempted"))
    play.settle()
    assert play.run.state is RunState.TRAINING
    (row,) = recoveries(play)
    assert (row.lost, row.steps_redone) == ("2", 1)


def that_has_replaced() -> Play:
    """Worker 1 has left for worker 2; worker 0 stays."""
    play = that_recovers()
    assert play.ask(m.ReplaceRequest(replace=1)).ok
    while play.run.world is None or play.run.world.rank_map.workers != (0, 2):
        play.train()
        play.settle()
    return play


def told_to_exit(play: Play) -> set[int]:
    sends = (each for _, _, done in play.entries for each in of(a.Send, done))  # type: ignore[attr-defined]
    return {w for send in sends if isinstance(send.message, m.Exit) for w in send.workers}  # type: ignore[attr-defined]


def test_a_leaver_stays_until_the_next_world_has_a_snapshot() -> None:
    play = that_has_replaced()
    assert [*play.run.agents.lingering] == [1]
    assert told_to_exit(play) == set()
    play.train()
    play.settle()
    assert told_to_exit(play) == {1}


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


@pytest.mark.parametrize("remembered", [True, False])
def test_steps_that_were_lost_with_their_teller_are_told_by_another(remembered: bool) -> None:
    """The first worker's words do not arrive any more, as if its agent stood still."""
    play = that_recovers()
    play.workers[0].report = list  # type: ignore[method-assign]
    for _ in range(3):
        play.train()
        play.settle()
    if not remembered:
        play.workers[1].remembered.clear()
    assert play.run.recorder.steps_done == 3
    lose(play, 0)
    play.settle()
    (row,) = recoveries(play)
    assert (row.step, row.steps_redone) == (5, 0)
    assert play.run.recorder.steps_done == (5 if remembered else 3)
    notes = [each.text for _, _, done in play.entries for each in of(a.Note, done)]  # type: ignore[attr-defined]
    assert ("nobody has told of steps 3 to 4" in notes) is not remembered
    told = [each.step for _, each, _ in play.entries if isinstance(each, m.StepDone)]  # type: ignore[attr-defined]
    assert told == [0, 1, 2, *([3, 4] if remembered else [])]


def test_an_evaluation_that_is_told_again_counts_once() -> None:
    play = that_recovers()
    assert play.run.world is not None
    told = m.Evaluated(
        worker=0,
        generation=play.run.world.generation,
        step=3,
        loss=1.0,
        batches=2,
        started_s=1.0,
        ended_s=2.0,
    )
    for again in (told, told.model_copy(update={"worker": 1})):
        play.feed(again)
    rows = [each.row for _, _, done in play.entries for each in of(a.Record, done)]  # type: ignore[attr-defined]
    assert [row.step for row in rows if isinstance(row, EvaluationRecord)] == [3]


@pytest.mark.parametrize("steps", [True, False])
def test_others_join_once_the_loss_is_made_good_or_that_takes_long(steps: bool) -> None:
    """Step 2 is done again, and then step 3, which was under way."""
    play = that_recovers(retry_s=10.0)
    lose(play, 1)
    play.settle()
    assert play.run.recorder.steps_done == 3
    play.wait(8.0)
    for done in (3, 4) if steps else ():
        assert play.run.handoffs.idle
        play.train()
        play.settle()
        assert play.run.recorder.steps_done == done
    assert play.run.handoffs.idle
    play.wait(0.1 if steps else 2.0)
    assert not play.run.handoffs.idle


def test_whoever_joins_in_place_of_the_lost_is_tried_again() -> None:
    play = that_recovers("a machine", retry_s=10.0)
    lose(play, 1)
    play.settle()
    for _ in range(2):
        play.train()
        play.settle()
    for wait_s in (1.0, 12.0, 22.0):  # twice as long each time
        play.wait(wait_s)
        assert play.run.handoffs.request is not None
        assert play.run.handoffs.request.origin == IN_PLACE
        (agent,) = (each for each in play.agents.values() if not (each.workers or each.ended))
        agent.end(1)
        play.settle()
        assert play.run.handoffs.idle
        play.wait(wait_s / 4)
        assert play.run.handoffs.idle
    play.wait(42.0)
    play.settle()
    for _ in range(3):
        play.train()
        play.settle()
    assert play.run.world is not None
    assert str(play.run.world.rank_map.layout) == "tp1 pp1 dp2"
    play.wait(100.0)
    assert play.run.handoffs.idle


def test_a_stop_while_a_world_recovers_is_carried_out_afterwards() -> None:
    play = that_recovers()
    lose(play, 1)
    answer = play.ask(m.StopRequest(checkpoint=True))
    assert answer.ok
    assert answer.text.startswith("stopping after the recovery")
    play.calm()
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.STOPPED
    assert len(recoveries(play)) == 1


def test_a_loss_in_a_run_that_is_about_to_save_and_stop_is_made_good_first() -> None:
    play = that_recovers()
    assert play.ask(m.StopRequest(checkpoint=True)).ok
    lose(play, 1)
    assert play.run.state is RunState.RECOVERING
    play.calm()
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.STOPPED
    (recovery,) = recoveries(play)
    assert recovery.steps_redone <= 1
    assert play.run.ending.step > recovery.step


def test_a_loss_in_a_run_that_is_about_to_stop_without_saving_ends_it() -> None:
    play = that_recovers()
    assert play.ask(m.StopRequest(checkpoint=False)).ok
    lose(play, 1)
    assert play.run.ending is not None
    assert "worker 1 lost: signal 9" in play.run.ending.reason
    assert not recoveries(play)


def test_a_loss_once_another_worker_has_ended_is_not_made_good() -> None:
    play = that_recovers()
    assert play.ask(m.StopRequest(checkpoint=True)).ok
    play.feed(m.Finished(worker=0, step=play.workers[0].step))
    lose(play, 1)
    assert play.run.ending is not None
    assert "worker 1 lost: signal 9" in play.run.ending.reason
    assert not recoveries(play)


def test_a_stop_is_remembered_where_the_world_cannot_recover() -> None:
    """The run has said that it will stop, and does not begin again from its checkpoint."""
    play = that_recovers()
    play.feed(e.CheckpointWritten(2, "/checkpoints/2", 1, 1.0, total_bytes=1))
    lose(play, 1)
    assert play.ask(m.StopRequest(checkpoint=False)).ok
    lose(play, 0)
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.STOPPED
    assert "no boundary is left whole in memory" in play.run.ending.reason


def test_it_is_remembered_where_the_run_was_about_to_go_on_later() -> None:
    play = that_recovers()
    play.feed(e.CheckpointWritten(2, "/checkpoints/2", 1, 1.0, total_bytes=1))
    play.feed(e.EndNear("the job's end", play.now_s, play.now_s + 100.0))
    lose(play, 1)
    assert play.ask(m.StopRequest(checkpoint=False)).ok
    lose(play, 0)
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.STOPPED


def test_a_stop_waits_for_a_long_step() -> None:
    play = that_recovers()
    for _ in range(100):
        play.run.elastic.estimates.handoffs.observe_step(400.0, 8)
    assert play.ask(m.StopRequest(checkpoint=False)).ok
    assert play.run._deadline is not None
    assert play.run._deadline.limit_s >= play.run.config.limits.boundary_s + 3 * 400.0


@pytest.mark.parametrize("newer", [True, False])
def test_memory_that_is_much_older_than_the_newest_checkpoint_is_not_gone_back_to(
    newer: bool,
) -> None:
    """As where snapshots have failed since the run grew, and checkpoints have not."""
    play = that_recovers()
    step = 19_500 if newer else play.run.recorder.steps_done + 1
    play.feed(e.CheckpointWritten(step, "/checkpoints", 1, 1.0, total_bytes=1))
    lose(play, 1)
    play.settle()
    if not newer:
        assert play.run.state is RunState.TRAINING
        return
    assert play.run.ending is not None
    assert play.run.ending.state is Ending.RESTART
    assert "there is a checkpoint of step 19500" in play.run.ending.reason


def test_who_stops_a_run_is_told_how_long_that_may_take() -> None:
    play = that_recovers()
    for _ in range(100):
        play.run.elastic.estimates.handoffs.observe_step(400.0, 8)
    answer = play.ask(m.StopRequest(checkpoint=True))
    assert play.run._deadline is not None
    assert answer.stops_within_s == play.run._deadline.limit_s
    assert answer.stops_within_s > play.run.config.limits.checkpoint_s + 3 * 400.0


def test_a_recovery_comes_before_the_stop_that_it_delays() -> None:
    play = that_recovers()
    limits = play.run.config.limits
    lose(play, 1)
    told_s = play.ask(m.StopRequest(checkpoint=False)).stops_within_s
    assert told_s is not None
    assert told_s >= 2 * limits.boundary_s + limits.prepare_s + limits.transfer_s
    play.calm()
    assert play.ask(m.StopRequest()).stops_within_s is None  # it is refused: the run has ended


def test_a_world_that_breaks_again_and_again_at_one_step_is_given_up() -> None:
    """Nobody is dead: the step itself fails, and would in each world that is filled for it."""
    play = that_recovers()
    for _ in range(MOST_ROUNDS):
        generation = play.run.world.generation  # type: ignore[union-attr]
        play.feed(m.Broken(worker=0, generation=generation, reason="NaN in the gradients"))
        assert play.run.state is RunState.RECOVERING
        play.settle()
        assert play.run.state is RunState.TRAINING
    generation = play.run.world.generation  # type: ignore[union-attr]
    play.feed(m.Broken(worker=0, generation=generation, reason="NaN in the gradients"))
    assert play.run.ending is not None
    assert "NaN in the gradients; 8 recoveries have come no further than step" in (
        play.run.ending.reason
    )


def test_recoveries_between_which_there_are_new_steps_may_be_many() -> None:
    play = that_recovers()
    for _ in range(MOST_ROUNDS + 2):
        generation = play.run.world.generation  # type: ignore[union-attr]
        play.feed(m.Broken(worker=0, generation=generation, reason="a link broke"))
        play.settle()
        for _ in range(2):
            play.train()
            play.settle()
    assert play.run.state is RunState.TRAINING
    assert len(recoveries(play)) == MOST_ROUNDS + 2


def test_who_lingers_stays_as_long_as_a_recovery_may_need_it() -> None:
    """Its time would be up while a worker that is late is still waited for."""
    play = that_has_replaced()
    play.wait(DEADLINES["boundary_s"] - 1.0)
    play.workers[2].mute = True
    lose(play, 0)
    play.settle()
    play.wait(DEADLINES["boundary_s"] - 1.0)
    assert play.run.state is RunState.RECOVERING
    assert told_to_exit(play) == set()
    assert [*play.run.agents.lingering] == [1]


def test_what_a_worker_says_that_was_given_up_meanwhile_is_not_waited_for() -> None:
    play = four_that_train()
    workers = play.run.world.rank_map.workers  # type: ignore[union-attr]
    late, gone = workers[0], workers[3]
    play.workers[late].mute = True
    generation = play.run.world.generation  # type: ignore[union-attr]
    lose(play, gone)
    assert play.run.agents.leave(late, ended=False)
    play.run.recoveries.lost(late, "its node is gone")
    said = m.Halted(worker=late, generation=generation, held=play.workers[late].held)
    play.feed(said)
    play.calm()
    assert play.run.state is RunState.TRAINING
    assert late not in play.run.world.rank_map.workers  # type: ignore[union-attr]
    (recovery,) = recoveries(play)
    assert recovery.rounds == 1
    play.feed(said)
    assert play.run.state is RunState.TRAINING


def test_nobody_waits_for_a_worker_that_ends_while_another_one_is_missed() -> None:
    play = that_recovers()
    assert play.ask(m.StopRequest(checkpoint=True)).ok
    lose(play, 1)
    play.feed(m.Finished(worker=0, step=play.workers[0].step))
    assert play.run.ending is not None
    assert "worker 0 lost: it has done its last step" in play.run.ending.reason


def test_who_does_not_answer_is_lost_too() -> None:
    """Here nobody is left then."""
    play = that_recovers()
    play.workers[0].mute = True
    lose(play, 1)
    play.settle()
    play.wait(DEADLINES["boundary_s"] + 1.0)
    assert play.run.ending is not None
    assert "worker 0 lost: did not answer for 30 s" in play.run.ending.reason
    assert "no boundary is left whole in memory" in play.run.ending.reason


def four_that_train() -> Play:
    """On two nodes, with snapshots of each step."""
    play = that_recovers()
    assert play.ask(m.ResizeRequest(workers=4)).ok
    play.calm()
    assert play.run.world is not None
    assert play.run.world.rank_map.layout.workers == 4
    return play


@pytest.mark.parametrize("lost", [1, 2])
def test_what_was_asked_for_has_one_more_turn_where_a_worker_was_lost_in_its_handoff(
    lost: int,
) -> None:
    play = four_that_train()
    play.grant(burst(4, 2))
    play.hear_pool()
    assert play.ask(m.ReplaceRequest(replace=3)).ok
    for worker in (1, 2)[:lost]:
        goes_on_until(play, lambda: "(PREPARE)" in play.run.handoffs.describe())
        lose(play, worker)
    play.calm()
    outcomes = [row.outcome for row in play.watch.records if row.notice.startswith("replace")]
    assert outcomes == ["failed", "completed" if lost == 1 else "failed"]
    assert play.run.world is not None
    assert (3 in play.run.world.rank_map) == (lost == 2)
    assert not play.run.elastic.queue.waiting
    assert not [*differences(play.journal(), play.scene.new_run)]


@pytest.mark.parametrize("coordinator", [False, True])
def test_a_node_can_still_be_left_where_something_else_was_lost_on_the_way_off_it(
    coordinator: bool,
) -> None:
    play = four_that_train()
    play.grant(burst(4, 2))
    play.hear_pool()
    play.tell(NodeWarned(play.run.agents.node_of(3), "preempted", play.now_s, play.now_s + 1_000.0))
    goes_on_until(play, lambda: "(PREPARE)" in play.run.handoffs.describe())
    assert play.run.handoffs.request is not None
    (stays, *_) = {0, 1, 2, 3} - {*play.run.handoffs.request.without}
    if coordinator:
        play.feed(e.TookOver(2, 7, "h"))
        play.feed(e.Regained())
        play.faults.planned.append((Phase.TRANSFER, Fault.VOTE_NO))
    else:
        lose(play, stays)
    goes_on_until(play, lambda: len(play.watch.records) > 1)
    assert play.watch.records[1].outcome == ("aborted" if coordinator else "failed")
    assert play.run.elastic.estimates.failed_leaves == 0


def test_who_did_not_answer_in_time_is_not_lost_a_second_time_as_it_ends() -> None:
    """The others fill a world meanwhile."""
    play = four_that_train()
    late, gone = play.run.world.rank_map.workers[0], play.run.world.rank_map.workers[3]  # type: ignore[union-attr]
    play.workers[late].mute = True
    lose(play, gone)
    play.settle()
    play.wait(DEADLINES["boundary_s"] + 1.0)
    assert play.run.state is RunState.RECOVERING
    lose(play, late)
    assert play.run.state is RunState.RECOVERING
    play.calm()
    assert play.run.state is RunState.TRAINING
    (recovery,) = recoveries(play)
    assert {*map(int, recovery.lost.split(","))} == {late, gone}


@pytest.mark.parametrize("fails", [True, False])
def test_what_goes_wrong_after_a_commit_is_made_good_in_the_world_that_has_committed(
    fails: bool,
) -> None:
    """All hear of it, and nobody is lost."""
    play = that_recovers()
    assert play.ask(m.ResizeRequest(workers=4)).ok
    while play.run.handoffs.committed_world is None:
        if not play.go_on(draw=False):
            play.train()
    target = play.run.handoffs.committed_world
    if fails:
        told = m.Failed(worker=0, generation=target.generation, reason="no memory")
        play.feed(told)
    else:
        play.wait(DEADLINES["release_s"] + 1.0)
    sent = [each for _, _, done in play.entries for each in of(a.Send, done)]
    (halt,) = [each for each in sent if isinstance(each.message, m.Halt)]  # type: ignore[attr-defined]
    assert halt.message.generation == target.generation  # type: ignore[attr-defined]
    assert {*halt.workers} >= {*target.rank_map.workers}  # type: ignore[attr-defined]


def test_a_leaver_that_cannot_free_its_source_costs_nothing() -> None:
    play = four_that_train()
    (leaver, *_) = {0, 1, 2, 3} - {0, 1}
    assert play.ask(m.ResizeRequest(workers=2)).ok
    play.calm()
    assert play.run.world is not None
    assert leaver not in play.run.world.rank_map.workers
    told = m.Failed(worker=leaver, generation=play.run.world.generation, reason="no memory")
    play.feed(told)
    assert play.run.state is RunState.TRAINING


@pytest.mark.parametrize(
    ("first", "second", "ending", "saves"),
    [
        ("end", "signal", Ending.REQUEUE, True),
        ("end", "operator", Ending.STOPPED, True),
        ("operator", "end", Ending.STOPPED, False),
        ("operator, with a checkpoint", "signal", Ending.STOPPED, True),
    ],
)
def test_of_orders_to_stop_while_a_world_recovers_the_first_stands_as_at_other_times(
    first: str, second: str, ending: str, saves: bool
) -> None:
    play = that_recovers()
    lose(play, 1)
    for order in (first, second):
        match order:
            case "end":
                play.feed(e.EndNear("the job's end", play.now_s, play.now_s + 100.0))
            case "signal":
                play.feed(e.StopSignalled("SIGTERM"))
            case _:
                assert play.ask(m.StopRequest(checkpoint="with" in order)).ok
    play.calm()
    assert play.run.ending is not None
    assert play.run.ending.state is ending
    stops = [each.message for _, _, done in play.entries for each in of(a.Send, done)]  # type: ignore[attr-defined]
    (stop,) = {each for each in stops if isinstance(each, m.Stop)}
    assert (stop.checkpoint is not None) == saves


def test_a_second_coordinator_that_dies_before_it_has_them_all_costs_no_time() -> None:
    clock = EventClock()
    for at_s, took_over in ((10.0, True), (15.0, True)):
        before_s, clock.at_s = clock.at_s, at_s
        if took_over:
            clock.present.stands_still(before_s)
    clock.at_s = 20.0
    assert clock.present.goes_on() == 20.0
    assert clock.present.now_s() == 0.0


def test_a_world_that_is_not_what_it_was_filled_with_does_not_train() -> None:
    play = that_recovers()
    lose(play, 1)
    while play.run.recoveries._now is not None and play.run.recoveries._now.target is None:
        play.go_on(draw=False)
    assert play.run.world is not None
    step = play.workers[0].held[0].scalars
    wrong = m.Refilled(worker=0, generation=play.run.handoffs.generation, scalars=step)
    play.feed(wrong)
    assert play.run.ending is not None
    assert "the world is not what the snapshots were" in play.run.ending.reason


def test_that_a_snapshot_failed_and_that_there_are_some_again_is_said_once() -> None:
    play = that_recovers()
    step = play.workers[0].step
    told = m.Unprotected(worker=1, generation=0, step=step, reason="the link is down")
    failed = play.feed(told)
    failed += play.feed(told.model_copy(update={"worker": 0}))
    assert [each.text for each in of(a.Note, failed)] == [  # type: ignore[attr-defined]
        f"the snapshot of step {step} in generation 0 failed, others will be tried: worker "
        f"{worker}: the link is down"
        for worker in (1, 0)
    ]
    seen = len(play.entries)
    for _ in range(3):
        play.train()
        play.settle()
    notes = [each.text for _, _, done in play.entries[seen:] for each in of(a.Note, done)]  # type: ignore[attr-defined]
    assert notes == [f"snapshots again, from that of step {step + 1} on"]


# ---- what many workers say at once


class CountedWorkers(tuple[int, ...]):
    """Knows how often all of them were gone through."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        CountedWorkers.walks += 1
        return super().__iter__()


def of_many(nodes: int, resumed: bool = False) -> tuple[Run, tuple[int, ...]]:
    """A run on so many nodes of two workers each that trains, or reads a checkpoint."""
    workers = 2 * nodes
    config = tiny_run(
        train={"steps": 100, "global_batch": workers},
        layouts={number: [{"dp": number}] for number in (workers, workers - 2)},
        workers={"initial": workers, "max": workers},
        snapshots={"every_steps": 1},
        cluster={"kind": "slurm"},
    )

    def counted(*given: object) -> RankMap:
        placed = place(*given)  # type: ignore[arg-type]
        return replace(placed, workers=CountedWorkers(placed.workers))

    run = Run(config, tiny_recipe(config).spec, place=counted)
    at = e.Resumed("/checkpoints/step-5", 5, 3, f"tp1 pp1 dp{workers}") if resumed else None
    run.handle(e.CoordinatorStarted({}, "/checkpoints", at), 1.0)
    for number in range(nodes):
        run.handle(NodeGranted(e.Node(f"n{number}", "main", 2)), 1.0)
    (launch,) = of(a.Launch, run.handle(e.LaunchAllowed(), 1.0))
    for each in launch.agents:  # type: ignore[attr-defined]
        (admit,) = of(a.Admit, run.handle(e.AgentMet(each.agent, 2), 1.0))
        for worker in admit.workers:  # type: ignore[attr-defined]
            run.handle(m.Hello(worker=worker, pid=1, host="h", booted_s=1.0), 1.0)
    assert run.world is not None
    return run, run.world.rank_map.workers


def calls_of_each(run: Run, said: Iterable[e.Event]) -> set[int]:
    """How many functions are called for one of the messages, as the numbers differ."""
    found, calls = set(), 0

    def count(_frame: FrameType, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    for each in said:
        calls = 0
        sys.setprofile(count)
        try:
            run.handle(each, 3.0)
        finally:
            sys.setprofile(before)
        found.add(calls)
    return found


DIGEST = m.ClassDigest(kind="main", tp_replicated=True, multi_stage=False, value="0" * 16)
SAVED = m.ScalarState(step=5, consumed_samples=40, optimizer_step=5, loss_scale=1.0, seed=1)


def calls_in_a_recovery(nodes: int) -> tuple[set[int], set[int]]:
    """For what survivors say that have let go, and that have filled the next world; but for the
    last of each."""
    run, workers = of_many(nodes)
    generation, layout = run.world.generation, str(run.world.rank_map.layout)  # type: ignore[union-attr]
    run.handle(NodeGone("n0", "its power failed"), 2.0)
    left = [worker for worker in workers if run.recoveries.involves(worker)]
    assert len(left) == len(workers) - 2

    def halted(worker: int) -> m.Halted:
        about = {"generation": generation, "layout": layout, "scalars": SAVED, "digests": {}}
        ranks = (workers.index(worker), workers.index(worker) - 2)
        held = tuple(m.HeldSnapshot(rank=rank % len(workers), **about) for rank in ranks)
        return m.Halted(worker=worker, generation=generation, held=held)

    *others, last = map(halted, left)
    let_go = calls_of_each(run, others)
    (refill,) = [
        each.message  # type: ignore[attr-defined]
        for each in of(a.Send, run.handle(last, 3.0))
        if isinstance(each.message, m.Refill)  # type: ignore[attr-defined]
    ]
    *filled, last_filled = (
        m.Refilled(worker=worker, generation=refill.generation, scalars=SAVED, digests=(DIGEST,))
        for worker in left
    )
    CountedWorkers.walks = 0
    fill = calls_of_each(run, filled)
    assert CountedWorkers.walks == 0, "all workers were gone through for one message"
    assert run.state is RunState.RECOVERING
    run.handle(last_filled, 3.0)
    assert CountedWorkers.walks > 0, "nothing was counted"
    assert run.state is RunState.TRAINING
    return let_go, fill


def test_what_one_of_many_says_in_a_recovery_costs_the_same_with_more_of_them() -> None:
    assert calls_in_a_recovery(4) == calls_in_a_recovery(16)


def test_so_does_what_one_says_that_has_read_its_checkpoint() -> None:
    def calls(nodes: int) -> set[int]:
        run, workers = of_many(nodes, resumed=True)
        about = {"generation": run.world.generation, "scalars": SAVED, "digests": ()}  # type: ignore[union-attr]
        return calls_of_each(run, (m.Restored(worker=each, **about) for each in workers))

    assert calls(4) == calls(16)
