"""Nodes that come and go under a run of scripted workers: growing, leaving in time, overtaking."""

from __future__ import annotations

from typing import Any

import pytest

from liver_hpc.cluster.launcher import EXIT_BOOT
from liver_hpc.coordinator.agents import MOST_BOOTS
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run.agents import TERMINATED
from liver_hpc.run.events import EndNear, Node, NodeGone, StopSignalled
from liver_hpc.run.outcome import Outcome
from tests.fakes import Fault
from tests.unit.coordinator.live import Start
from tests.unit.coordinator.nodes import LONG_S, MAIN, POLICY, SPARE, burst, grown, on_two_nodes

pytestmark = pytest.mark.timeout(60)


def test_granted_nodes_become_one_growth(make: Start) -> None:
    run = grown(make)
    record = run.record(0)
    assert (record.source, record.target) == ("tp1 pp1 dp2", "tp2 pp1 dp2")
    assert record.notice == "resize to tp2 pp1 dp2 (nodes granted)"
    on = {request.seat.node for request in run.cluster.launched}
    assert on == {"n1", "n2", "burst3", "burst4"}
    run.until(lambda: len(run.metrics.notices) == 2, "both notices")
    assert {n.outcome for n in run.metrics.notices} == {"in use"}


def test_a_burst_node_on_which_nothing_boots_does_not_keep_the_run_from_another_one(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_two_nodes(make, layouts={2: [{"dp": 2}], 3: [{"dp": 3}], 4: [{"dp": 4}]})
    cluster, pool, why = run.cluster, run.cluster.pool, list[str]()

    class Fallen(dict[str, int]):
        def get(self, agent: str, *_default: Any) -> Any:
            here = {each.agent for each in cluster.launched if each.seat.node == "burst3"}
            return EXIT_BOOT if agent in here else None

    def reject(node: str, reason: str) -> None:
        why.append(reason)
        pool.say(NodeGone(node, reason))

    monkeypatch.setattr(cluster, "fallen_agents", Fallen())
    monkeypatch.setattr(pool, "reject", reject)
    pool.grant(burst(3))
    pool.grant(burst(4))
    run.until(lambda: len(run.status()["workers"]) == 3, "growth onto the other node")
    assert why == ["workers fail in boot: "]
    assert [each.outcome for each in run.metrics.reconfigurations][:MOST_BOOTS] == ["aborted"] * 3


def test_a_node_for_which_there_is_no_layout_is_not_used(make: Start) -> None:
    run = on_two_nodes(make)
    run.cluster.pool.grant(burst(3))
    run.until(lambda: len(run.status()["nodes"]) == 3, "the node")
    assert run.status()["handoff"] is None
    assert not run.metrics.reconfigurations


def test_the_pool_hears_how_many_workers_could_be_used(make: Start) -> None:
    run = on_two_nodes(make)
    run.until(lambda: run.cluster.pool.wanted == [2], "the wish for two more workers")
    run.resize("tp=2")
    run.until(lambda: run.cluster.pool.wanted == [2, 0], "the wish to be taken back")


def test_a_warned_node_is_left_and_given_back(make: Start) -> None:
    run = grown(make)
    run.cluster.pool.warn("burst3", window_s=LONG_S)
    record = run.record(1)
    assert (record.outcome, record.target) == ("completed", "tp1 pp1 dp2")
    assert record.notice == "resize to tp1 pp1 dp2 (leaving burst3: preempted)"
    left = {run.coordinator.core.agents.node_of(worker) for worker in run.status()["workers"]}
    assert left == {"n1", "n2"}
    run.until(lambda: "burst3" in run.cluster.pool.given_back, "the node to be given back")
    run.until(lambda: len(run.metrics.notices) == 3, "the notice")
    notice = run.metrics.notices[2]
    assert (notice.kind, notice.node, notice.outcome) == ("preempted", "burst3", "in time")
    assert notice.generation == record.generation
    assert notice.at_s <= notice.left_s <= notice.deadline_s


def test_a_warning_overtakes_a_growing_handoff(make: Start) -> None:
    run = on_two_nodes(make)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.cluster.pool.grant(burst(3, slots=2))
    run.reach(Phase.PREPARE)
    run.cluster.pool.warn("burst3", window_s=LONG_S)
    record = run.record(0)
    assert record.outcome == "aborted"
    assert "nodes ['burst3'] have to be left at once" in record.detail
    run.until(lambda: "burst3" in run.cluster.pool.given_back, "the node to be given back")
    assert run.status()["layout"] == "tp1 pp1 dp2"


def test_a_warning_of_a_training_node_overtakes_and_the_overtaken_wish_comes_again(
    make: Start,
) -> None:
    run = on_two_nodes(make, SPARE, deadlines={"exit_s": 0.2})
    run.resize("tp=2")
    run.record(0)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    run.cluster.pool.warn("n2", "drained")
    assert run.record(1).outcome == "aborted"
    # No deadline, and slots enough: the worker of n2 is replaced, by the joiner that answers.
    leaving = run.record(2)
    assert (leaving.outcome, leaving.target) == ("completed", "tp2 pp1 dp1")
    assert (leaving.spares, 3 in run.status()["workers"]) == (1, True)
    assert "leaving n2: drained" in leaving.notice
    assert "n2" not in {
        run.coordinator.core.agents.node_of(worker) for worker in run.status()["workers"]
    }
    again = run.record(3)
    assert again.notice == "resize to tp2 pp1 dp2 (operator)"
    assert again.outcome == "aborted"
    assert "wanted free slots" in again.detail


def test_a_handoff_that_leaves_the_node_anyway_goes_on(make: Start) -> None:
    run = grown(make)
    run.cluster.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2")
    run.reach(Phase.PREPARE)
    run.silent(0)
    run.cluster.pool.warn("burst4", window_s=LONG_S)
    held = run.cluster.workers[0]
    held.script.mute = False
    held.say([m.Prepared(worker=0, generation=2)])
    assert run.record(1).outcome == "completed"
    run.until(lambda: len(run.metrics.notices) == 3, "the notice")
    assert run.metrics.notices[2].action == "merged into generation 2"


def test_a_window_that_turns_out_shorter_is_not_spent_on_joiners(make: Start) -> None:
    """As where Slurm has said late what a signal meant."""
    layouts = {1: [{}], 2: [{"dp": 2}], 4: [{"dp": 4}]}
    run = on_two_nodes(make, Node("n3", "main", slots=1), layouts=layouts)
    run.cluster.faults.fail_at(2, Phase.BOOT, Fault.SILENT)
    run.cluster.pool.warn("n2", window_s=LONG_S)
    run.reach(Phase.BOOT)
    run.cluster.pool.warn("n2", "cancelled", window_s=5.0)
    assert "there is less time than it was begun for" in run.record(0).detail
    leaving = run.record(1)
    assert (leaving.outcome, leaving.target) == ("completed", "tp1 pp1 dp1")
    assert run.coordinator.core.elastic.estimates.failed_leaves == 0


def test_a_spare_component_is_joined_when_asked_and_left_again(make: Start) -> None:
    run = on_two_nodes(make, SPARE)
    run.cluster.train(1)
    assert run.status()["handoff"] is None
    run.resize("tp=2,dp=2")
    assert run.record(0).outcome == "completed"
    assert "n5" in {request.seat.node for request in run.cluster.launched}
    run.resize("dp=2")
    assert run.record(1).outcome == "completed"
    assert {run.coordinator.core.agents.node_of(w) for w in run.status()["workers"]} == {"n1", "n2"}


def test_a_failed_growth_is_tried_again_after_a_while(make: Start) -> None:
    run = on_two_nodes(make)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.FAIL)
    run.cluster.pool.grant(burst(3, slots=2))
    assert run.record(0).outcome == "aborted"
    assert run.record(1).outcome == "completed"


def test_idle_burst_nodes_go_back(make: Start) -> None:
    run = grown(make)
    run.resize("dp=2")
    assert run.record(1).outcome == "completed"
    back = run.cluster.pool.given_back
    run.until(lambda: sorted(back) == ["burst3", "burst4"], "the idle nodes to be given back")
    run.until(lambda: len(run.status()["nodes"]) == 2, "them to be struck off")


def test_workers_on_a_node_that_is_gone_are_lost(make: Start) -> None:
    run = grown(make)
    run.cluster.pool.say(NodeGone("burst3", "down"))
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert "its node burst3 is gone: down" in outcome.reason
    assert run.metrics.notices[-1].outcome == "lost"


def test_a_leaver_whose_node_is_gone_is_lost_once(make: Start) -> None:
    """Its connection may break only after the pool has said so."""
    run = grown(make)
    leaver = next(w for w in (2, 3) if run.coordinator.core.agents.node_of(w) == "burst3")
    played = run.cluster.workers[leaver]
    hear: Any = played.script.receive
    deaf: Any = lambda message: [] if isinstance(message, m.Exit) else hear(message)  # noqa: E731
    played.script.receive = deaf  # type: ignore[method-assign]
    run.cluster.faults.fail_at(0, Phase.RELEASE, Fault.SILENT)
    run.resize("dp=2")
    run.reach(Phase.RELEASE)
    run.silent(0)
    run.cluster.pool.say(NodeGone("burst3", "down"))
    run.until(lambda: "is gone" in run.status()["last_event"], "the news")
    played.channel.close()
    stayer = run.cluster.workers[0]
    stayer.script.mute = False
    stayer.say(stayer.script.first_step())
    assert run.record(1).outcome == "completed"
    assert run.status()["state"] == "training"


def test_handoffs_that_were_overtaken_have_not_failed(make: Start) -> None:
    run = on_two_nodes(make, burst(5), burst(6), layouts={n: [{"dp": n}] for n in (1, 2, 3, 4)})
    assert run.record(0).target == "tp1 pp1 dp4"
    run.until(lambda: run.status()["handoff"] is None, "its end")
    estimates = run.coordinator.core.elastic.estimates
    for node in ("burst5", "burst6"):
        run.cluster.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
        run.cluster.pool.warn(node, window_s=LONG_S)
        run.until(lambda: run.cluster.workers[0].script.mute, "the handoff to be held up")
        run.reach(Phase.PREPARE)
        run.cluster.workers[0].script.mute = False
    run.cluster.pool.warn("n2", window_s=LONG_S)
    run.record(3)
    assert len(run.status()["workers"]) == 1
    outcomes = [record.outcome for record in run.metrics.reconfigurations[1:]]
    assert outcomes == ["aborted", "aborted", "completed"]
    assert estimates.failed_leaves == 0


def test_a_warning_with_a_deadline_hurries_one_without(make: Start) -> None:
    run = on_two_nodes(make, layouts={2: [{"dp": 2}], 4: [{"dp": 4}]})
    run.cluster.pool.warn("n2", "drained")
    run.until(lambda: "to be left: drained" in str(run.status()["nodes"]), "the warning")
    run.cluster.pool.warn("n2", "time limit", window_s=LONG_S)
    outcome = run.outcome()
    assert outcome.state == "restart"
    assert "leaving n2: time limit" in outcome.reason


def test_a_node_that_nobody_takes_is_kept_when_handoffs_away_from_it_fail(make: Start) -> None:
    run = on_two_nodes(make, layouts={1: [{}], 2: [{"dp": 2}], 4: [{"dp": 4}]})
    run.fail_leaves(3)
    run.cluster.pool.warn("n2", "drained")
    run.until(lambda: run.coordinator.core.elastic.nodes.stuck is not None, "the run to stay")
    assert run.status()["state"] == "training"
    run.control.say(StopSignalled("SIGTERM"))
    assert run.outcome().state == "stopped"
    assert "stays: 3 handoffs have failed" in run.metrics.notices[-1].action


def test_an_operator_can_stop_a_run_that_is_about_to_begin_again(make: Start) -> None:
    run = grown(make)
    for played in run.cluster.workers.values():
        played.script.mute = True  # the boundary is far
    run.fail_leaves(3)
    run.cluster.pool.warn("burst3", window_s=0.001)
    run.until(lambda: run.status()["state"] == "stopping", "the way to the disk")
    assert run.ask(m.StopRequest()).text == "stopping at the next step boundary"
    for worker in run.status()["workers"]:
        played = run.cluster.workers[worker]
        played.script.mute = False
        played.say([m.Finished(worker=worker, step=0)])
    assert run.outcome().state == "stopped"


def test_the_first_workers_wait_for_nodes(make: Start) -> None:
    run = make(begin=False, nodes=MAIN[:1], policy=POLICY)
    run.start_only()
    run.until(lambda: "waiting for nodes" in run.status()["last_event"], "the wait")
    run.cluster.pool.grant(burst(3))
    run.until(lambda: run.status()["state"] == "training", "training")
    assert {request.seat.node for request in run.cluster.launched} == {"n1", "burst3"}


def test_a_node_that_goes_before_training_began_ends_this_life(make: Start) -> None:
    run = make(begin=False, nodes=MAIN, policy=POLICY)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    run.until(lambda: len(run.cluster.launched) == 2, "the launch")
    run.cluster.pool.warn("n2", window_s=LONG_S)
    assert run.outcome().state == "restart"


def test_a_node_that_is_gone_before_training_began_ends_this_life(make: Start) -> None:
    run = make(begin=False, nodes=MAIN, policy=POLICY)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    run.until(lambda: len(run.cluster.launched) == 2, "the launch")
    run.cluster.pool.say(NodeGone("n2", "down"))
    assert run.outcome().state == "restart"


@pytest.mark.parametrize(("code", "state"), [(TERMINATED, "restart"), (87, "failed")])
def test_an_agent_that_is_told_to_end_as_it_starts_ends_this_life(
    make: Start, code: int, state: str
) -> None:
    run = make(begin=False, nodes=MAIN, policy=POLICY)
    run.cluster.fallen_agents["a1"] = code
    run.start_only()
    outcome = run.outcome()
    assert outcome.state == state
    assert f"agent a1 ended with exit code {code}" in outcome.reason


def test_the_end_of_the_own_allocation_is_a_requeue(make: Start) -> None:
    run = on_two_nodes(make, checkpoint={"keep": 1})
    run.cluster.train(3)
    run.cluster.pool.say(EndNear("time limit", 0.0, 1.0))
    outcome = run.outcome()
    assert outcome.state == "requeue"
    assert outcome == Outcome("requeue", outcome.reason, 3)
    assert run.cluster.pool.closed


def test_the_end_of_an_allocation_that_may_not_be_queued_again_is_a_stop(make: Start) -> None:
    run = on_two_nodes(make, cluster={"slurm": {"requeue": False}})
    run.cluster.train(3)
    run.cluster.pool.say(EndNear("time limit", 0.0, 1.0))
    outcome = run.outcome()
    assert outcome == Outcome("stopped", outcome.reason, 3)
    assert outcome.reason.startswith("time limit; ")
    for played in run.cluster.workers.values():
        (told,) = (message for message in played.script.received if isinstance(message, m.Stop))
        assert told.checkpoint == str(run.directory / "checkpoints")


def test_a_signal_of_an_agent_is_brought_before_the_pool(make: Start) -> None:
    run = on_two_nodes(make)
    run.cluster.agents["a1"].say(m.Warned(agent="a1", signal="TERM", at_s=1.0))
    run.until(lambda: run.cluster.pool.signals == [("n2", "SIGTERM")], "the pool to hear of it")


def test_an_agent_says_how_its_worker_ended(make: Start) -> None:
    run = on_two_nodes(make)
    lost = next(w for w in (0, 1) if run.coordinator.core.agents.node_of(w) == "n2")
    struck_off = 7  # its slot is free now, so the core hears of it, too
    run.cluster.agents["a1"].say(m.WorkerEnded(agent="a1", worker=struck_off, how="exit code 0"))
    gone = {"type": "worker_gone", "worker": struck_off, "reason": "exit code 0"}
    run.until(lambda: gone in [entry.event for entry in run.metrics.entries], "the core to hear")
    run.cluster.agents["a1"].say(m.WorkerEnded(agent="a1", worker=lost, how="signal 9"))
    assert run.outcome().reason == f"worker {lost} lost: signal 9"
