"""What workers tell with their signs of life names a node, and drains it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from liver_hpc.protocol import messages as m
from tests.unit.coordinator.live import LiveRun, Start
from tests.unit.coordinator.nodes import POLICY, on_two_nodes

pytestmark = pytest.mark.timeout(30)

LAYOUTS = {1: [{}], 2: [{"dp": 2}]}


def beat(run: LiveRun, until: Callable[[], object], slow: int) -> None:
    """Each worker tells of one more pass, again and again, with a step between; one takes three
    times as long."""
    for passes in range(1, 200):
        if until():
            return
        for worker in run.coordinator.core.agents.present():
            seconds = passes * (3.0 if worker == slow else 1.0)
            told = m.ForwardTimes(generation=0, passes=passes, seconds=seconds)
            channel = run.cluster.workers[worker].channel
            channel.send(m.Heartbeat(worker=worker, step=passes, forward=told))
        if run.coordinator.core.handoffs.idle:
            run.cluster.train(1)
        time.sleep(0.03)
    pytest.fail("nothing has come of it")


def policy(**section: object) -> dict[str, object]:
    return {**POLICY, "stragglers": {"for_s": 0.01, **section}}


def test_the_slow_node_is_named_and_no_message_is_for_it(make: Start) -> None:
    run = on_two_nodes(make, layouts=LAYOUTS, policy=policy())
    node = run.coordinator.core.agents.node_of(1)
    beat(run, lambda: run.metrics.stragglers, slow=1)
    (named,) = run.metrics.stragglers
    assert (named.node, named.worker, named.action) == (node, 1, "named alone")
    assert named.ratio == pytest.approx(3.0)
    assert f"node {node} straggles: " in run.status()["last_event"]
    told = {entry.event["type"] for entry in run.metrics.entries}
    assert "heartbeat" not in told
    assert run.ask(m.StopRequest()).ok


def test_with_drain_the_run_leaves_it(make: Start) -> None:
    run = on_two_nodes(make, layouts=LAYOUTS, policy=policy(drain=True))
    node = run.coordinator.core.agents.node_of(1)
    beat(run, lambda: run.metrics.stragglers, slow=1)
    assert (run.record(0).outcome, run.record(0).target) == ("completed", "tp1 pp1 dp1")
    assert run.cluster.pool.avoided == [node]
    run.until(lambda: run.status()["workers"] == [0], "the other worker alone")
    assert run.ask(m.StopRequest()).ok


def test_workers_that_cannot_be_compared_are_logged_once(
    make: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "liver_hpc.run.pace")
    run = make(policy=policy())  # on one machine
    beat(run, lambda: "no nodes can be compared" in caplog.text, slow=1)
    beat(run, lambda: len(run.metrics.steps) > 20, slow=1)
    assert caplog.text.count("no nodes can be compared") == 1
    assert not run.metrics.stragglers
    assert run.ask(m.StopRequest()).ok
