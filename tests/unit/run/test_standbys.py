"""Standbys: launched in free slots, used by the next handoff, launched again, given up at last."""

from __future__ import annotations

from dataclasses import replace

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.events import NodeGone, NodeWarned
from liver_hpc.run.standbys import MOST_FAILURES
from tests.fakes import Fault
from tests.unit.run.choices import Choices
from tests.unit.run.play import Play
from tests.unit.run.scenes import N1, N2, POLICY, SCENES, WIDE1, WIDE2, burst

(STANDBY,) = [scene for scene in SCENES if scene.config.workers.standby]
SETTLE_S = POLICY["settle_s"]


def training(code: str = "") -> Play:
    """Two workers that train on a node of two slots; the other node is free."""
    play = Play(STANDBY, Choices(b""))
    play.code = {"my_model": code} if code else {}
    play.begin()
    play.settle()
    assert play.run.world is not None
    return play


def with_standby() -> Play:
    """The same with worker 2 in a slot of the other node."""
    play = training()
    play.wait(SETTLE_S)
    play.settle()
    assert [*play.run.agents.kept] == [2]
    return play


def launches(play: Play) -> list[a.Launch]:
    return [
        each for _, _, actions in play.entries for each in actions if isinstance(each, a.Launch)
    ]


def rehearsed(play: Play, worker: int) -> list[str]:
    received = play.workers[worker].received
    return [each.layout for each in received if isinstance(each, m.Rehearse)]


def notes(play: Play) -> list[str]:
    found = [each for _, _, actions in play.entries for each in actions]
    return [each.text for each in found if isinstance(each, a.Note) and "standby" in each.text]


def test_one_is_launched_once_no_more_nodes_come_and_rehearses_what_trains() -> None:
    play = training()
    assert len(launches(play)) == 1
    play.wait(SETTLE_S)
    play.settle()
    assert [each.seat.node for each in launches(play)[1].agents] == [WIDE2.name]
    assert play.run.snapshot(play.now_s, "", "").spares == (2,)
    assert rehearsed(play, 2) == ["tp1 pp1 dp2"]
    play.ask(m.ResizeRequest(layout="tp=2"))
    for _ in range(4):
        play.settle()
        play.train()
    play.settle()
    assert rehearsed(play, 2) == ["tp1 pp1 dp2", "tp2 pp1 dp1"]
    assert len(launches(play)) == 2


def test_a_request_waits_for_one_that_boots_in_a_slot_that_it_needs() -> None:
    workers = STANDBY.config.workers.model_copy(update={"initial": 4, "max": 4})
    config = STANDBY.config.model_copy(update={"workers": workers})
    play = Play(replace(STANDBY, config=config), Choices(b""))
    play.begin()
    play.settle()
    play.ask(m.ResizeRequest(layout="dp=2"))
    for _ in range(4):
        play.settle()
        play.train()
    play.settle()
    play.wait(SETTLE_S)
    assert play.run.agents.booting(-1)
    assert play.ask(m.ResizeRequest(layout="dp=4")).ok
    assert play.run.handoffs.idle
    for _ in range(4):
        play.settle()
        play.train()
    play.settle()
    assert [(each.target, each.spares) for each in play.watch.records] == [
        ("tp1 pp1 dp2", 0),
        ("tp1 pp1 dp4", 1),
    ]


def test_it_stays_as_long_as_nobody_wants_it() -> None:
    play = with_standby()
    play.wait(10 * STANDBY.config.deadlines.boot_s)
    play.settle()
    assert [*play.run.agents.kept] == [2]


def test_a_node_that_has_to_be_left_is_left_onto_it_without_a_boot_and_another_one_comes() -> None:
    play = with_standby()
    gone = play.run.agents.node_of(0)
    assert gone == play.run.agents.node_of(1) == WIDE1.name
    play.ask(m.ReplaceRequest(replace=0))
    assert play.run.handoffs.attempt is not None
    assert play.run.handoffs.attempt.target is not None, "nobody has to boot"
    for _ in range(4):
        play.settle()
        play.train()
    play.settle()
    (record,) = play.watch.records
    assert (record.outcome, record.spares) == ("completed", 1)
    assert play.run.world is not None
    assert {*play.run.world.rank_map.workers} == {1, 2}
    play.wait(SETTLE_S)
    play.settle()
    assert [*play.run.agents.kept] == [*play.run.standbys._rehearsed] == [3]


def test_on_a_node_that_has_to_be_left_none_boots_and_none_waits() -> None:
    play = training()
    play.wait(SETTLE_S)
    play.tell(NodeWarned(WIDE2.name, "drained", play.now_s))
    play.hear_pool()
    assert not play.run.agents.booting(-1)
    play.settle()
    assert not play.run.agents.kept

    play = training()
    play.wait(SETTLE_S)
    while not play.workers.get(2):
        play.go_on(draw=False)
    play.feed(NodeGone(WIDE2.name, "down"))
    play.settle()
    assert not play.run.agents.kept, "its Hello came after the end of its node"

    play = with_standby()
    play.tell(NodeWarned(WIDE2.name, "drained", play.now_s))
    play.settle()
    assert not play.run.agents.kept
    assert not notes(play), "it did not fail"


def test_those_that_come_to_nothing_are_launched_again_after_ever_longer_pauses_and_given_up() -> (
    None
):
    play = with_standby()
    play.close(play.workers[2], "signal 9")
    play.settle()
    assert play.run.state.value == "training"
    for _ in range(MOST_FAILURES - 1):
        play.faults.planned.append((Phase.BOOT, Fault.DIE))
    for _ in range(40):
        play.wait(1.0)
        play.settle()
    assert len(launches(play)) == 2 + MOST_FAILURES - 1
    assert notes(play)[0] == "standby: worker 2 ended: signal 9"
    assert notes(play)[-1].endswith("; no more are launched")
    assert len(notes(play)) == MOST_FAILURES
    # Whoever is replaced shows that workers can boot again.
    play.ask(m.ReplaceRequest(replace=0))
    for _ in range(4):
        play.settle()
        play.train()
    play.wait(SETTLE_S + 40.0)
    play.settle()
    assert len(play.run.agents.kept) == 1


def test_one_that_never_says_hello_is_ended() -> None:
    play = training()
    play.faults.planned.append((Phase.BOOT, Fault.SILENT))
    play.wait(SETTLE_S)
    play.settle()
    limits = STANDBY.config.deadlines
    play.wait(limits.boot_s + limits.meet_s)
    play.settle()
    assert notes(play) == ["standby: waited 25 s for standbys to boot"]
    play.wait(SETTLE_S)
    play.wait(0.1)
    play.settle()
    assert len(play.run.agents.kept) == 1


def test_one_of_other_code_than_those_that_train_is_no_spare() -> None:
    play = training("0f")
    play.code = {"my_model": "ff"}
    play.wait(SETTLE_S)
    play.settle()
    other = "worker 2 on h has other code or samples than worker 1 on h: my_model is ff, 0f there"
    assert notes(play) == [f"standby: {other}"]
    assert not play.run.agents.kept
    assert not play.run.agents.taken().get("w2")


def test_a_launch_that_fails_is_a_failure() -> None:
    play = training()
    play.launches_fail = True
    play.wait(SETTLE_S)
    play.settle()
    assert notes(play) == ["standby: cannot launch 1 workers: node w2 is away"]
    assert not any(isinstance(event, e.ShellFailed) for _, event, _ in play.entries)


def test_a_joiner_that_was_kept_on_a_burst_node_does_not_hold_that_node_as_a_standby() -> None:
    (scene,) = [scene for scene in SCENES if scene.name == "wide nodes"]
    workers = scene.config.workers.model_copy(update={"initial": 2, "max": 3, "standby": 1})
    config = scene.config.model_copy(update={"workers": workers})
    play = Play(replace(scene, config=config, first=(N1, N2)), Choices(b""))
    play.begin()
    play.settle()
    play.faults.planned.append((Phase.TRANSFER, Fault.VOTE_NO))
    play.grant(burst(3))
    play.hear_pool()
    play.wait(SETTLE_S)
    play.settle()
    play.train()
    play.settle()
    (record,) = play.watch.records
    assert record.outcome == "aborted"
    assert [*play.run.agents.kept] == [2]
    assert play.run.agents.node_of(2) == "b3"
    play.ask(m.ResizeRequest(workers=1))
    play.calm()
    assert play.run.world is not None
    (trains,) = play.run.world.rank_map.workers
    (free,) = {"n1", "n2"} - {play.run.agents.node_of(trains)}
    (standby,) = play.run.agents.kept
    assert play.run.agents.node_of(standby) == free
    done = [action for _, _, actions in play.entries for action in actions]
    assert a.GiveBack("b3") in done


def test_a_kept_joiner_on_a_burst_node_goes_when_its_time_is_up_and_is_no_standby() -> None:
    """Nor does a standby wait for it to go."""
    play = with_standby()
    node = play.run.elastic.nodes[WIDE2.name]
    node.node = replace(node.node, burst=True)
    assert play.run.elastic.nodes.standbys() == []
    play.wait(STANDBY.config.deadlines.boot_s)
    play.settle()
    assert 2 not in play.run.agents.kept


def test_a_standby_is_launched_beside_a_joiner_that_is_kept_on_a_burst_node() -> None:
    play = with_standby()
    node = play.run.elastic.nodes[WIDE2.name]
    node.node = replace(node.node, burst=True)
    play.grant(replace(WIDE2, name="w3"))
    play.hear_pool()
    play.wait(SETTLE_S)
    assert [each.seat.node for each in launches(play)[-1].agents] == ["w3"]
