"""How a run starts and ends, and who is turned away; against scripted workers."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from liver_hpc import __version__
from liver_hpc.coordinator.loop import LOST_S
from liver_hpc.errors import DeadlineError, MeetingError
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.base import Identity
from liver_hpc.rendezvous.channel import ChannelClosed, connect
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import Superseded, claim_epoch
from liver_hpc.run.events import (
    CheckpointWritten,
    EndNear,
    Resumed,
    StateRestored,
    StopSignalled,
)
from liver_hpc.run.lifecycle import STOPPING
from liver_hpc.run.outcome import Outcome, WorldNote
from tests.fakes import Fault
from tests.unit.checkpoint.disk import scalar_state
from tests.unit.coordinator.live import LIMIT_S, SECRET, Start
from tests.unit.coordinator.test_store import Asker

pytestmark = pytest.mark.timeout(60)


def test_a_run_from_its_first_to_its_last_step(make: Start) -> None:
    run = make(train={"steps": 3, "global_batch": 8}, checkpoint={"every_steps": None})
    begin = m.Begin(
        generation=0, rank_map=m.WireRankMap(tp=1, pp=1, dp=2, workers=(0, 1), nodes=(0, 0))
    )
    assert run.cluster.got(0, m.Begin) == run.cluster.got(1, m.Begin) == [begin]
    run.cluster.train(3, last=True)

    assert run.outcome() == Outcome("finished", "all 3 steps are done", 3)
    assert [(s.step, s.phase) for s in run.metrics.steps] == [(0, "first"), (1, ""), (2, "")]
    assert run.cluster.got(0, m.Exit)
    assert run.cluster.got(1, m.Exit)


def test_one_that_another_has_followed_before_it_listens_leaves_all_as_it_is(make: Start) -> None:
    """It read a journal for long, or ended a start: the address is the other one's by now."""
    run = make(begin=False)
    next_one = claim_epoch(run.directory)
    address = run.directory / "coordinator.json"
    address.write_text("the next one's")
    with pytest.raises(Superseded):
        run.coordinator.run()
    assert next_one.number == 2
    assert address.read_text() == "the next one's"
    assert run.metrics.entries == []


@pytest.mark.parametrize("finished", [False, True])
def test_a_finished_run_waits_longer_until_old_checkpoints_are_removed(
    make: Start, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No next start removes them."""
    train, limits = {"steps": 3, "global_batch": 8}, list[float]()
    run = make(train=train, checkpoint={"every_steps": None})
    deadlines = run.coordinator._config.deadlines
    monkeypatch.setattr(
        run.coordinator._checkpoints, "close", lambda *limits_s: limits.extend(limits_s)
    )
    if not finished:
        run.ask(m.StopRequest(checkpoint=False))
    run.cluster.train(3 if finished else 1, last=True)
    assert run.outcome().state == ("finished" if finished else "stopped")
    removals_s = deadlines.boundary_s if finished else deadlines.control_s
    assert limits == [deadlines.control_s, removals_s]
    assert deadlines.boundary_s != deadlines.control_s


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("state", ["stopped", "restart"])
def test_an_end_waits_less_for_agents_where_nodes_do_not_answer(
    make: Start, lost: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs there ends once Slurm knows of the node. A restart wants to know that, too."""
    run, waited = make(begin=False), list[float]()
    with monkeypatch.context() as patched:
        patched.setattr(run.cluster.launcher, "close", waited.append)
        patched.setattr(run.coordinator._agents, "unreachable", lambda: lost)
        patched.setattr(run.coordinator._performer, "outcome", Outcome(state, "so it was", 1))
        run.coordinator._close_launcher()
    assert waited == [LOST_S if lost and state == "stopped" else math.inf]


def test_where_the_coordinator_is_stands_in_a_private_file(make: Start) -> None:
    run = make()
    path = run.directory / "coordinator.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = json.loads(path.read_text())
    assert told["pid"] == os.getpid()
    assert run.metrics.entries[0].event["epoch"] == told["epoch"] > 0
    os.utime(path, (1000.0, 1000.0))  # of a file server whose clock is behind
    assert RunDirectory(run.directory).coordinators_process() == os.getpid()


def test_the_world_that_trains_is_noted_for_whoever_lists_runs(make: Start) -> None:
    run = make()
    note = RunDirectory(run.directory).world
    assert stat.S_IMODE((run.directory / "world.json").stat().st_mode) == 0o600
    first = note()
    assert first is not None
    assert (first.generation, first.layout, first.workers) == (0, "tp1 pp1 dp2", 2)
    assert (first.step, first.steps) == (0, 60)
    run.ask(m.ResizeRequest(layout="tp2 pp1 dp2"))
    run.cluster.train(1)
    run.until(lambda: run.status()["handoffs_done"] == 1, "the handoff")
    second = note()
    assert second is not None
    assert (second.generation, second.layout, second.workers) == (1, "tp2 pp1 dp2", 4)


def test_no_world_is_noted_while_a_start_has_not_trained(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of the start before, nor its own while it reads the checkpoint."""
    run = make(begin=False)
    WorldNote(3, "tp2 pp1 dp2", 4, 0, 60, 1.0, "local").write(run.directory)
    resumed = Resumed("iter_0000007", 7, 3, "tp2 pp1 dp2")
    monkeypatch.setattr(run.coordinator._checkpoints, "open", lambda wrote: resumed)
    run.start_only()
    run.until(lambda: run.coordinator.core.world, "the first world")
    assert run.status()["state"] == "starting"
    assert RunDirectory(run.directory).world() is None
    run.coordinator._inbox.put(StateRestored(5))
    run.until(lambda: run.status()["state"] == "training", "training to begin")
    note = RunDirectory(run.directory).world()
    assert note is not None
    assert (note.generation, note.step) == (5, 7)


def test_a_world_that_cannot_be_noted_trains(make: Start) -> None:
    run = make(begin=False)
    (run.directory / "world.json").mkdir()
    run.start()
    assert run.status()["state"] == "training"


def test_agents_are_launched_with_the_workers_of_a_node(make: Start) -> None:
    run = make(workers={"initial": 4, "max": 4}, cluster={"workers_per_node": 3})
    assert [(r.agent, len(r.seat.slots), str(r.layout)) for r in run.cluster.launched] == [
        ("a0", 3, "tp2 pp1 dp2"),
        ("a1", 1, "tp2 pp1 dp2"),
    ]
    assert run.status()["workers"] == [0, 1, 2, 3]


def test_the_status_says_where_the_run_stands(make: Start) -> None:
    run = make()
    run.cluster.train(2)
    run.until(lambda: run.status()["step"] == 2, "two steps")
    status = run.status()
    assert (status["run"], status["state"], status["steps"]) == ("tiny", "training", 60)
    assert (status["generation"], status["layout"]) == (0, "tp1 pp1 dp2")
    assert status["tokens_per_s"] == 128.0
    assert status["handoff"] is None
    assert "training begins" in status["last_event"]


def test_a_stop_ends_the_run_at_a_step_boundary(make: Start) -> None:
    run = make()
    run.cluster.train(5)
    reply = run.ask(m.StopRequest())
    assert reply.text == "stopping at the next step boundary"
    assert reply.data["stops_within_s"] > 0
    assert run.outcome() == Outcome("stopped", "an operator's request", 5)


def test_a_stop_before_training_begins(make: Start) -> None:
    run = make(begin=False)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    assert run.ask(m.StopRequest()).text == "stopped before training began"
    assert run.outcome().state == "stopped"


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.SILENT])
def test_a_first_worker_that_does_not_come_fails_the_run(make: Start, fault: Fault) -> None:
    run = make(begin=False, deadlines={"boot_s": 0.3, "meet_s": 0.2})
    run.cluster.faults.fail_at(1, Phase.BOOT, fault)
    run.start_only()
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert (
        outcome.reason
        == {
            Fault.DIE: "agent a0 ended with exit code 5 before its workers were ready; "
            "see logs/*a0*.log",
            Fault.SILENT: "waited 0.5 s for Hello of workers 1",
        }[fault]
    )


def test_a_run_whose_worker_refused_to_boot_says_why(make: Start) -> None:
    run = make(begin=False)
    run.cluster.fallen_agents["a0"] = 87
    log = run.directory / "logs" / "agent-a0.log"
    log.parent.mkdir(exist_ok=True)
    why = "worker 1 of agent a0 failed in boot: PlanError: no (exit code 1)"
    log.write_text(f"10:00 INFO [agent a0] starts\n10:01 ERROR [agent a0] {why}\nTraceback\n")
    run.start_only()
    assert f"were ready: {why}; see logs/*a0*.log" in run.outcome().reason


def test_workers_that_end_too_early_fail_the_run(make: Start) -> None:
    run = make()
    run.cluster.train(3, last=True)
    outcome = run.outcome()
    assert (outcome.state, outcome.reason) == ("failed", "the workers ended after 3 of 60 steps")


def test_a_run_stops_where_its_interval_says(make: Start) -> None:
    run = make(train={"steps": 60, "global_batch": 8, "stop_every_steps": 3})
    run.cluster.train(3, last=True)
    state, why = "stopped", "train.stop_every_steps is 3; checkpoint of step 3 is not complete; "
    assert run.outcome() == Outcome(state, why + "there is none", 3)


def test_workers_that_do_not_stop_fail_the_run_and_are_named(make: Start) -> None:
    run = make(deadlines={"boundary_s": 0.3})
    run.cluster.workers[1].script.mute = True
    run.ask(m.StopRequest())
    assert run.outcome().reason == "waited 0.3 s for Finished of workers 1"


@pytest.mark.parametrize("ending", ["stopped", "requeue"])
def test_a_worker_that_is_lost_as_the_run_ends_does_not_make_it_begin_again(
    make: Start, ending: str
) -> None:
    """Also where there is a checkpoint to begin again from."""
    run = make(checkpoint={"keep": 1})
    run.coordinator._inbox.put(CheckpointWritten(1, "a directory", 1, 0.1, 1))  # type: ignore[arg-type]
    for played in run.cluster.workers.values():
        played.script.mute = True  # the boundary is far
    if ending == "stopped":
        run.ask(m.StopRequest())
    else:
        run.control.say(EndNear("time limit", 0.0, 0.0))
        run.until(lambda: run.status()["state"] == "stopping", "the news")
    run.cluster.workers[1].channel.close()
    outcome = run.outcome()
    assert outcome.state == ending
    assert "worker 1 lost" in outcome.reason
    assert "the checkpoint of step 1 is left" in outcome.reason


def test_a_slow_disk_holds_up_nothing_but_the_end_of_the_run(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint has come to something before the run has ended; it is waited for once."""
    run, goes_on = make(), threading.Event()

    def slow(_parts: object, step: int, *_of: object) -> CheckpointWritten:
        assert goes_on.wait(LIMIT_S)
        return CheckpointWritten(step, "a directory", 1, 0.1, 1)

    monkeypatch.setattr(run.coordinator._checkpoints, "_made_of", slow)
    for worker, played in run.cluster.workers.items():
        played.say([m.Saved(worker=worker, generation=0, scalars=scalar_state(1))])
    files = run.coordinator._checkpoints._files
    run.until(lambda: files._tasks.unfinished_tasks, "what has been saved")
    assert run.status()["state"] == "training"
    for worker, played in run.cluster.workers.items():
        played.say([m.Finished(worker=worker, step=1)])
    run.until(lambda: run.coordinator.core.state is STOPPING, "the first worker's end")
    time.sleep(0.3)
    assert run.coordinator.core.state is STOPPING
    goes_on.set()
    run.outcome()
    assert run.coordinator.core._checkpointed == (1, "a directory")


def test_a_run_that_is_stopped_before_its_launch_launches_nothing(make: Start) -> None:
    run = make(begin=False)
    run.control.say(StopSignalled("SIGTERM"))
    run.start_only()
    assert run.outcome() == Outcome("stopped", "SIGTERM", 0)
    assert run.cluster.launched == []


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again"])
def test_a_run_whose_directory_is_removed_stops_with_a_checkpoint(
    make: Start, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command would find it any more. What writes a checkpoint may have made it again."""
    monkeypatch.setattr("liver_hpc.coordinator.loop.SHOWN_EVERY_S", 0.01)
    run = make(deadlines={"coordinator_s": 0.3}, checkpoint={"keep": 1})
    run.status()  # while the operator can still find it
    run.cluster.train(3)
    shutil.rmtree(run.directory)
    if again:
        run.directory.mkdir()
    outcome = run.outcome()
    assert (outcome.state, outcome.step) == ("stopped", 3)
    gone = run.directory / "coordinators" / "1"
    assert outcome.reason.startswith(f"its directory was removed or moved: {gone} is gone; ")
    for played in run.cluster.workers.values():
        (told,) = (message for message in played.script.received if isinstance(message, m.Stop))
        assert told.checkpoint == str(run.directory / "checkpoints")


def test_a_run_whose_directory_comes_back_in_time_trains_on(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.coordinator.loop.SHOWN_EVERY_S", 0.01)
    run = make(deadlines={"coordinator_s": 3.0})
    aside = run.directory.with_name("aside")
    for _ in range(3):  # together longer than that
        run.directory.rename(aside)
        time.sleep(1.2)
        aside.rename(run.directory)
        time.sleep(0.1)
    assert run.status()["state"] == "training"


def test_a_run_whose_file_system_is_gone_trains_on(tmp_path: Path) -> None:
    epoch = claim_epoch(tmp_path)
    assert not epoch.is_removed()
    elsewhere = replace(epoch, device=epoch.path.stat().st_dev + 1)  # what is there without it
    epoch.path.unlink()
    assert epoch.is_removed()
    assert not elsewhere.is_removed()


def test_a_wait_in_the_store_ends_in_its_time(make: Start) -> None:
    run = make()
    asker = Asker(run.coordinator._store)
    number = asker.begin("get", "of nobody", timeout_s=0.05)
    run.until(lambda: number in asker.replies, "the answer")
    assert "waited 0.05 s" in asker.replies[number].error


def test_an_agent_that_is_not_expected_is_refused(make: Start) -> None:
    run = make()
    with pytest.raises(MeetingError, match="agent a9 is not expected"):
        run.cluster.rendezvous.meet(Identity(agent="a9", host="h", workers=1), SECRET)
    with pytest.raises(MeetingError, match="agent a0 has met already"):
        run.cluster.rendezvous.meet(Identity(agent="a0", host="h", workers=2), SECRET)


@pytest.mark.parametrize("theirs", ["0.0.1", ""])
def test_an_agent_of_another_release_is_told_to_end(make: Start, theirs: str) -> None:
    """As one that a coordinator of another release has left."""
    run = make()
    where = json.loads((run.directory / "coordinator.json").read_text())
    agent = connect((where["host"], where["port"]), SECRET, LIMIT_S, "the coordinator")
    agent.send(m.Calls(agent="a0", version=theirs, launches=("a0",)))
    fault = f"liver_hpc is {__version__} here, and {theirs or 'an earlier one'} for agent a0: "
    told = agent.receive(LIMIT_S)
    assert isinstance(told, m.Exit)
    assert told.reason.startswith(fault)
    assert run.status()["state"] == "training"


def test_a_second_connection_of_a_worker_is_turned_away(make: Start) -> None:
    run = make()
    where = json.loads((run.directory / "coordinator.json").read_text())
    stranger = connect((where["host"], where["port"]), SECRET, LIMIT_S, "the coordinator")
    stranger.send(m.Hello(worker=1, pid=1, host="test", booted_s=0.0))
    stranger.send(m.Failed(worker=1, generation=0, reason="not me"))
    with pytest.raises(ChannelClosed):
        stranger.receive(LIMIT_S)
    assert run.status()["state"] == "training"


def test_a_worker_that_speaks_for_another_fails_the_run(make: Start) -> None:
    run = make()
    run.cluster.workers[1].channel.send(m.Heartbeat(worker=0, step=0))
    assert run.outcome().reason.startswith("worker 1 sent")


def test_a_file_system_that_fails_ends_a_start_and_not_the_run(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    run.coordinator._inbox.put(CheckpointWritten(1, "a directory", 1, 0.1, 1))  # type: ignore[arg-type]
    run.until(lambda: "CheckpointWritten" in str(run.coordinator.core._history), "the news")

    def fails() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run.coordinator, "_look_at_agents", fails)
    outcome = run.outcome()
    assert outcome.state == "restart"
    assert outcome.reason.startswith("[Errno 5] Input/output error; the checkpoint of step 1")


def test_what_cannot_be_closed_does_not_change_how_the_run_ended(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is away at the end: a run that is to be queued again still is."""
    run = make(begin=False, checkpoint={"keep": 1})

    def away() -> None:
        raise DeadlineError("waited 30 s for jobs named x to end")

    monkeypatch.setattr(run.cluster.pool, "close", away)
    run.start()
    run.control.say(EndNear("time limit", 0.0, 0.0))
    outcome = run.outcome()
    assert outcome.state == "requeue"
    assert outcome.reason.endswith("; not all could be ended: waited 30 s for jobs named x to end")


def test_a_run_that_is_to_be_queued_again_is_also_without_a_checkpoint(make: Start) -> None:
    """Its workers are ended with their node before the boundary came."""
    run = make(checkpoint={"keep": 1})
    for played in run.cluster.workers.values():
        played.script.mute = True
    run.control.say(EndNear("preempted", 0.0, 0.0))
    run.until(lambda: run.status()["state"] == "stopping", "the news")
    run.cluster.workers[1].channel.close()
    outcome = run.outcome()
    assert outcome.state == "requeue"
    assert outcome.reason.endswith("; no checkpoint is left")
