"""Nodes that operators drain, and drain no longer."""

from __future__ import annotations

import pytest

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run.events import NodeWarned
from tests.fakes import Fault
from tests.unit.coordinator.live import LiveRun, Start
from tests.unit.coordinator.nodes import LONG_S, burst, grown, on_two_nodes

pytestmark = pytest.mark.timeout(60)

ANY_NUMBER = {1: [{}], 2: [{"dp": 2}], 4: [{"dp": 4}]}


def test_an_operator_drains_a_node(make: Start) -> None:
    run = grown(make)
    reply = run.ask(m.DrainRequest(node="burst4", within_s=60.0))
    assert reply.text == "leaving burst4 within 60 s"
    assert run.cluster.pool.avoided == ["burst4"]
    assert run.record(1).outcome == "completed"
    refused = run.ask(m.DrainRequest(node="n9"))
    assert not refused.ok
    assert "node 'n9' is not held by the run; nodes are n1, n2" in refused.text


def test_a_node_that_the_run_cannot_do_without_is_not_drained(make: Start) -> None:
    run = on_two_nodes(make, layouts={2: [{"dp": 2}], 4: [{"dp": 4}]})
    refused = run.ask(m.DrainRequest(node="n2"))
    assert not refused.ok
    assert "no layout is allowed without n2" in refused.text


def test_a_drain_does_not_put_off_what_is_due_before(make: Start) -> None:
    run = grown(make)
    run.cluster.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
    run.cluster.pool.warn("burst4", window_s=20.0)
    run.reach(Phase.PREPARE)
    run.silent(0)
    reply = run.ask(m.DrainRequest(node="burst4", within_s=600.0))
    assert reply.text.startswith("burst4 is being left already, within ")
    held = run.coordinator.core.elastic.nodes.get("burst4")
    assert held is not None
    assert held.warning is not None
    assert held.warning.reason == "preempted"
    run.cluster.workers[0].script.mute = False
    run.cluster.workers[0].say([m.Prepared(worker=0, generation=2)])
    assert run.record(1).outcome == "completed"


# ---- and undo that


def drain(run: LiveRun, node: str) -> None:
    reply = run.ask(m.DrainRequest(node=node, within_s=LONG_S))
    assert reply.ok, reply.text


def undo(run: LiveRun, node: str) -> str:
    reply = run.ask(m.DrainRequest(node=node, undo=True))
    assert reply.ok, reply.text
    return reply.text


def nodes_in_use(run: LiveRun) -> set[str]:
    return {run.coordinator.core.agents.node_of(worker) for worker in run.status()["workers"]}


def warning_of(run: LiveRun, node: str) -> NodeWarned | None:
    held = run.coordinator.core.elastic.nodes.get(node)
    assert held is not None
    return held.warning


def test_a_node_that_is_drained_no_longer_is_grown_onto_again(make: Start) -> None:
    run = on_two_nodes(make, layouts=ANY_NUMBER)
    drain(run, "n2")
    assert (run.record(0).outcome, run.record(0).target) == ("completed", "tp1 pp1 dp1")
    assert nodes_in_use(run) == {"n1"}
    run.until(lambda: "n2" in run.cluster.pool.given_back, "the node to be left")
    assert undo(run, "n2") == "n2 is used again"
    assert (run.record(1).outcome, run.record(1).target) == ("completed", "tp1 pp1 dp2")
    assert nodes_in_use(run) == {"n1", "n2"}
    assert run.cluster.pool.avoided == []
    run.until(lambda: len(run.metrics.notices) == 2, "the notices")
    drained, granted = run.metrics.notices
    assert (drained.kind, drained.outcome) == ("operator", "in time")
    assert (granted.kind, granted.outcome) == ("granted", "in use")


def test_a_handoff_off_the_node_goes_on_when_the_drain_is_undone(make: Start) -> None:
    run = on_two_nodes(make, layouts=ANY_NUMBER)
    run.cluster.faults.fail_at(0, Phase.PREPARE, Fault.SILENT)
    drain(run, "n2")
    run.reach(Phase.PREPARE)
    run.silent(0)
    undo(run, "n2")
    held = run.cluster.workers[0]
    held.script.mute = False
    held.say([m.Prepared(worker=0, generation=1)])
    assert [run.record(number).outcome for number in (0, 1)] == ["completed", "completed"]
    assert nodes_in_use(run) == {"n1", "n2"}


def test_a_node_that_has_gone_may_be_asked_for_again(make: Start) -> None:
    run = grown(make)
    drain(run, "burst4")
    run.record(1)
    run.until(lambda: len(run.status()["nodes"]) == 3, "the node to be given back")
    run.cluster.pool.grant(burst(4))
    back = run.cluster.pool.given_back
    run.until(lambda: back.count("burst4") == 2, "it to be kept off, and given back again")
    run.until(lambda: len(run.status()["nodes"]) == 3, "it to be gone")
    assert undo(run, "burst4") == "burst4 is not held; it may be asked for again"
    assert run.cluster.pool.avoided == []
    run.cluster.pool.grant(burst(4))
    assert run.record(2).target == "tp2 pp1 dp2"


def test_only_what_an_operator_has_drained_can_be_undone(make: Start) -> None:
    run = on_two_nodes(make, layouts=ANY_NUMBER)
    refused = run.ask(m.DrainRequest(node="n2", undo=True))
    assert (refused.ok, refused.text) == (False, "node 'n2' is not drained; drained nodes are none")
    drain(run, "n2")
    refused = run.ask(m.DrainRequest(node="n1", undo=True))
    assert refused.text == "node 'n1' is not drained; drained nodes are n2"


def test_what_slurm_said_before_the_operator_holds_when_that_is_undone(make: Start) -> None:
    run = on_two_nodes(make, layouts=ANY_NUMBER)
    run.cluster.pool.warn("n2", "drained")
    run.record(0)
    drain(run, "n2")
    warning = warning_of(run, "n2")
    assert warning is not None
    assert warning.reason == "operator"
    assert undo(run, "n2") == "n2 is not drained any more, but to be left: drained"
    assert (warning_of(run, "n2") or warning).reason == "drained"
    # What Slurm takes back while the drain holds, it does not say again.
    drain(run, "n2")
    run.cluster.pool.grant(run.coordinator.core.elastic.nodes.get("n2").node)  # type: ignore[union-attr]
    run.until(lambda: "to be left: operator" in str(run.status()["nodes"]), "the drain to hold")
    assert undo(run, "n2") == "n2 is used again"


def test_what_slurm_says_after_the_operator_holds_when_that_is_undone(make: Start) -> None:
    run = on_two_nodes(make, layouts=ANY_NUMBER)
    drain(run, "n2")
    run.cluster.pool.warn("n2", "preempted", window_s=5.0)
    run.until(lambda: "to be left: preempted" in str(run.status()["nodes"]), "the warning")
    reply = run.ask(m.DrainRequest(node="n2", within_s=LONG_S))
    assert reply.text.startswith("n2 is being left already, within ")
    assert undo(run, "n2") == "n2 is not drained any more, but to be left: preempted"


def test_a_node_that_is_taken_away_anyway_is_kept_off_after_that(make: Start) -> None:
    """It was drained while Slurm was taking it."""
    run = grown(make)
    run.cluster.pool.warn("burst4", window_s=20.0)
    reply = run.ask(m.DrainRequest(node="burst4", within_s=LONG_S))
    assert reply.text.startswith("burst4 is being left already, within ")
    assert run.cluster.pool.avoided == ["burst4"]
    run.record(1)
    run.until(lambda: len(run.status()["nodes"]) == 3, "the node to be given back")
    run.cluster.pool.grant(burst(4))
    back = run.cluster.pool.given_back
    run.until(lambda: back.count("burst4") == 2, "it to be kept off, and given back again")
