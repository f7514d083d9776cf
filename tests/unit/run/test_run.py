"""The run's core, one event at a time: what playing whole runs has found, and what is simplest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from liver_hpc.config.schema import PolicySection, RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.events import Node, NodeGone, NodeGranted, NodeWarned
from liver_hpc.run.lifecycle import RunState
from tests.fakes import Fault
from tests.unit.run.begun import MACHINE, TWO_NODES, of, training
from tests.unit.run.choices import Choices
from tests.unit.run.play import Play
from tests.unit.run.remembered import remembered
from tests.unit.run.replay import differences
from tests.unit.run.scenes import ANY_NUMBER, LONGEST_WAIT_S, POLICY, SCENES, Scene, burst


def in_boot(scene: object = TWO_NODES) -> Play:
    """A handoff to four workers, whose joiners have not said anything yet."""
    play = training(scene)
    assert play.ask(m.ResizeRequest(workers=4)).ok
    assert play.run.handoffs.attempt is not None
    assert play.run.handoffs.attempt.target is None
    return play


def test_a_tick_that_does_nothing_leaves_no_trace() -> None:
    """The journal leaves it out, so a core that replays the journal never hears of it."""
    play = training()
    before = remembered(play.run)
    play.now_s += 0.1
    assert play.run.handle(e.Tick(), play.now_s) == []
    assert remembered(play.run) == before


@pytest.mark.parametrize(("scene", "granted"), [(TWO_NODES, 2), (MACHINE, 0)])
def test_nodes_are_told_by_name_and_a_machine_alone_is_not(scene: Scene, granted: int) -> None:
    actions = [each for _, _, decided in training(scene).entries for each in decided]
    notes = [each.text for each in actions if isinstance(each, a.Note)]
    assert sum(text.startswith("node granted: ") for text in notes) == granted


def test_a_run_that_has_ended_ends_no_handoff_any_more() -> None:
    """The deadline of the attempt in which it failed passes, and nothing comes of it."""
    play = in_boot(MACHINE)
    play.feed(e.ShellFailed("worker 0 sent what it may not"))
    assert play.run.state is RunState.ENDED
    told = play.run.snapshot(play.now_s, "", "")
    assert (told.handoffs_aborted, told.handoffs_failed) == (0, 1)
    play.now_s += 1_000.0
    assert not of(a.Record, play.feed(e.Tick()))


OTHER = "worker 2 on h has other code or samples than worker 1 on h: torch is 2.12.0, 2.11.0 there"


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


def test_a_layout_does_not_wait_for_more_burst_nodes_than_may_be_held_at_once() -> None:
    """Those that are held already count, too."""
    config = SCENES[3].config.model_dump() | {"layouts": ANY_NUMBER}
    config["cluster"]["slurm"]["burst"]["max_nodes"] = 2
    play = training(replace(SCENES[3], config=RunConfig.model_validate(config)))
    for more in (2, 1):
        answer = play.ask(m.ResizeRequest(workers=4))
        assert not answer.ok
        assert answer.text.endswith(f"; burst.max_nodes allows {more} more")
        assert play.run.snapshot(play.now_s, "", "").queued == ()
        play.grant(burst(3))
        play.calm()
    assert play.ask(m.ResizeRequest(workers=3)).text.startswith("waits for burst nodes")


def test_a_layout_that_waits_for_burst_nodes_is_withdrawn_for_the_next_one_as_is_told() -> None:
    play = training(SCENES[3])
    play.ask(m.ResizeRequest(workers=2))
    answer = play.ask(m.ResizeRequest(layout="tp=2,dp=1"))
    assert answer.text.startswith("waits for burst nodes: resize to tp2 pp1 dp1 ")
    assert answer.text.endswith("; resize to tp1 pp1 dp2 (operator) is withdrawn")


@pytest.mark.parametrize("busy", [False, True])
def test_one_that_the_run_file_asks_for_is_withdrawn_for_the_next_one_as_is_told(
    busy: bool,
) -> None:
    notices = [{"at_step": 1, "workers": 3}, {"at_step": 2, "workers": 4}]
    config = SCENES[3].config.model_dump() | {"notices": notices, "layouts": ANY_NUMBER}
    play = training(replace(SCENES[3], config=RunConfig.model_validate(config)))
    if busy:  # both have to wait for their turn first
        play.grant(burst(3))
        play.settle()
        assert play.ask(m.ReplaceRequest(replace=0)).ok
    for _ in range(4):
        play.train()
    play.calm()
    told = [each.text for *_, acts in play.entries for each in acts if isinstance(each, a.Note)]
    withdrawn = "resize to tp1 pp1 dp3 (step 1) is withdrawn"
    assert sum(withdrawn in each for each in told) == 1
    assert any("waits for burst nodes: resize to tp1 pp1 dp4 (step 2)" in each for each in told)


def test_how_long_a_layout_waits_for_burst_nodes_is_no_part_of_its_handoff() -> None:
    play = training(SCENES[3])
    assert play.ask(m.ResizeRequest(workers=2)).text.startswith("waits for burst nodes")
    play.wait(3_600.0)
    play.grant(burst(3))
    play.calm()
    (row,) = play.watch.records
    assert row.began_s - row.notice_s > 3_600.0
    assert row.boot_ended_s - row.began_s < 1.0
    assert play.run.elastic.estimates.handoffs.prepare_s(to_boot=1) < 2.0


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


@pytest.mark.parametrize("asks", [True, False])
def test_a_handoff_without_room_for_both_worlds_is_made_again_at_once_in_bounded_memory(
    asks: bool,
) -> None:
    play = training()
    if asks:
        assert play.ask(m.ResizeRequest(layout="tp=2")).ok
    else:
        for node in (burst(3), burst(4)):
            play.grant(node)
        play.settle()
        play.wait(POLICY["settle_s"])
    handoffs = play.run.handoffs
    while (attempt := handoffs.attempt) is None or handoffs._machine.phase is not Phase.PREPARE:
        assert play.go_on(draw=False)
    assert not attempt.request.bounded
    failed = m.Failed(worker=1, generation=attempt.generation, reason="has 1.00 GiB", no_room=True)
    play.say(1, failed)
    began_s = play.now_s
    play.settle()
    play.train()
    play.settle()
    (off,) = play.watch.records
    assert (off.outcome, off.detail) == ("aborted", "PREPARE: worker 1: has 1.00 GiB")
    again = handoffs.attempt
    assert again is not None
    assert again.request.bounded
    assert again.request.target.layout == attempt.request.target.layout
    assert play.now_s - began_s < POLICY["retry_s"]
    play.calm()
    done = play.watch.records[-1]
    assert (done.outcome, done.target) == ("completed", off.target)
    assert not [*differences(play.journal(), TWO_NODES.new_run)]


@pytest.mark.parametrize("losses", [(False, True), (True, False)])
def test_a_turn_for_want_of_room_is_beside_that_for_a_lost_coordinator(
    losses: tuple[bool, ...],
) -> None:
    play = training()
    assert play.ask(m.ResizeRequest(layout="tp=2")).ok
    handoffs = play.run.handoffs
    ended = 0
    for lost in losses:
        while handoffs.generation == ended or handoffs._machine.phase is not Phase.PREPARE:
            if not play.go_on(draw=False):
                play.train()
        ended = handoffs.generation
        if lost:
            play.feed(e.TookOver(ended, 7, "h"))
            play.feed(e.Regained())
        play.say(1, m.Failed(worker=1, generation=ended, reason="failed", no_room=not lost))
    play.calm()
    outcomes = [record.outcome for record in play.watch.records]
    assert outcomes == ["aborted", "aborted", "completed"]
    assert not [*differences(play.journal(), TWO_NODES.new_run)]


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
