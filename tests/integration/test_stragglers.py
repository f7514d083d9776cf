"""A node that computes more slowly than the other one is named, and left live."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.report.store import RunRecords
from tests.integration.elastic import losses
from tests.integration.nodes import on_nodes
from tests.integration.runs import (
    ENDLESS,
    run_config,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)
from tests.integration.slow import SLOW

pytestmark = pytest.mark.timeout(240)


def test_the_slow_node_is_named_and_drained_live_and_losses_stay(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1, alone on its node, sleeps in its forward passes: three seconds are enough."""
    monkeypatch.setenv(SLOW, "1:0.15")
    config = run_config(
        tmp_path,
        ENDLESS,
        recipe="tests.integration.slow:SlowGPT",
        policy={"stragglers": {"for_s": 3.0, "drain": True}},
        deadlines={"heartbeat_s": 4.0},
    )
    run, pool, coordinator = on_nodes(config, n1=1, n2=1)
    watch(run, lambda status: status.handoffs_done == 1, 120.0)
    watch(run, lambda status: status.handoff is None, 20.0)
    watch(run, lambda status: status.workers == (0,), 10.0)
    wait_until(lambda: bool(pool.given_back), 20.0, "the node to be left")
    records = stop_and_read(run)
    coordinator.join(30.0)
    assert not coordinator.is_alive()

    (named,) = records.stragglers
    assert (named.worker, named.action) == (1, "drained")
    assert named.ratio > 1.5
    assert named.for_s >= 3.0
    assert named.compared == 2
    assert pool.avoided == pool.given_back == [named.node]
    (handoff,) = records.reconfigurations
    assert (handoff.outcome, handoff.digest_equal) == ("completed", True)
    assert (handoff.source, handoff.target) == ("tp1 pp1 dp2", "tp1 pp1 dp1")
    assert f"(leaving {named.node}: straggling)" in handoff.notice
    assert handoff.target_workers == "0"
    (left,) = [notice for notice in records.notices if notice.kind == "straggling"]
    assert (left.node, left.outcome) == (named.node, "in time")
    assert len(records.steps) > handoff.step
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
