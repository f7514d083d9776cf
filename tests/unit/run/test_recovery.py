"""The run's core, as a world loses a worker."""

from __future__ import annotations

import pytest

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.event_clock import EventClock
from liver_hpc.run.events import NodeGone, NodeWarned
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.records import EvaluationRecord
from liver_hpc.run.recovery import MOST_ROUNDS
from liver_hpc.run.requests import IN_PLACE
from tests.fakes import Fault
from tests.unit.run.begun import (
    goes_on_until,
    lose,
    of,
    recoveries,
    that_has_replaced,
    that_recovers,
    told_to_exit,
)
from tests.unit.run.play import Play
from tests.unit.run.replay import differences
from tests.unit.run.scenes import DEADLINES, burst


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
