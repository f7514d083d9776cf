"""How the run's core begins: too few nodes, its checkpoint, restarts in vain, evaluations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from liver_hpc.config.schema import ClusterSection, EvalSection
from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.actions import End, Ending
from liver_hpc.run.codec import memory_of
from liver_hpc.run.entries import Entry
from liver_hpc.run.events import NodeGone, NodeGranted
from liver_hpc.run.lifecycle import (
    MOST_READ_S,
    MOST_RESTARTS_IN_VAIN,
    MOST_STARTS_IN_VAIN,
    RunState,
)
from liver_hpc.run.machine import Run
from liver_hpc.run.records import EvaluationRecord, NoticeRecord
from tests.unit.run.begun import TWO_NODES, of
from tests.unit.run.choices import Choices
from tests.unit.run.endings import replays
from tests.unit.run.play import Play
from tests.unit.run.scenes import DEADLINES, SCENES, burst

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


def test_a_start_has_the_generation_of_the_world_that_it_prepares() -> None:
    play = on_one_node()
    told = play.run.snapshot(play.now_s, "", "")
    assert (told.state, told.step, told.generation) == ("starting", 5, RESUMED.generation + 2)


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


@pytest.mark.parametrize(("reason", "fails"), [("time limit", True), ("preempted", False)])
def test_starts_that_their_jobs_end_overtakes_are_not_queued_again_for_ever(
    reason: str, fails: bool
) -> None:
    """Where a start takes longer than the job's time, less its window, no later one comes further;
    a later one may be preempted later."""
    journal: list[Entry] = []
    ends: list[End] = []
    for _ in range(MOST_STARTS_IN_VAIN):
        play = on_one_node(burst=1, in_vain=memory_of(journal).in_vain)
        play.grant(burst(3))
        play.feed(e.EndNear(reason, play.now_s, play.now_s + 60.0))
        journal += play.journal()
        assert play.run.ending is not None
        ends.append(play.run.ending)
    last = Ending.FAILED if fails else Ending.REQUEUE
    assert [each.state for each in ends] == [*[Ending.REQUEUE] * 2, last]
    assert ("before training began, 3 times in a row" in ends[-1].reason) == fails


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


def verify(run: Run, number: int, value: int, step: int = 10) -> None:
    """The worker of a number tells the digest of its copy."""
    world = run.world
    assert world is not None
    digest = m.ClassDigest(
        kind="parameter", tp_replicated=True, multi_stage=False, value=f"{value:016x}"
    )
    told = m.Verified(
        worker=world.rank_map.workers[number],
        generation=world.generation,
        step=step,
        digests=(digest,),
    )
    run.handle(told, 6.0)


def verified() -> Run:
    """A run of two workers that trains."""
    run, _ = begun(e.Memory(4, evaluated=5), 7)
    assert run.world is not None
    run.handle(e.StateRestored(run.world.generation), 4.0)
    assert len(run.world.rank_map.workers) == 2
    return run


def test_a_run_whose_copies_differ_goes_back_to_its_checkpoint_and_says_which_differ() -> None:
    run = verified()
    verify(run, 0, 0)
    assert run.ending is None, "not all have told"
    verify(run, 1, 1)
    assert run.ending is not None
    assert "copies of the state differ after step 10: parameter" in run.ending.reason
    assert "(workers 1) is 0000000000000001" in run.ending.reason


def test_what_is_told_late_of_an_earlier_step_does_not_keep_a_later_one_from_being_compared() -> (
    None
):
    """As where the agent of some calls again, while the others train on."""
    run = verified()
    for step in (10, 20):
        verify(run, 0, step, step=step)
    for step in (10, 20):
        verify(run, 1, 7, step=step)
    assert run.ending is not None
    assert "copies of the state differ after step 20: parameter" in run.ending.reason


def test_equal_copies_are_nothing_to_tell_and_those_of_other_steps_are_never_compared() -> None:
    run = verified()
    verify(run, 0, 1)
    verify(run, 1, 1)
    verify(run, 0, 1, step=20)
    verify(run, 1, 2, step=30)
    verify(run, 0, 2, step=30)
    assert run.ending is None
