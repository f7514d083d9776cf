"""A slow node of a real Slurm is left live, given back, and not asked for again."""

from __future__ import annotations

import pytest

from tests.cluster.harness import SlurmCluster
from tests.cluster.slurm_runs import RUN_FILE, each_step_once, slurm_run
from tests.integration.slow import SLOW

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]


def test_a_slow_burst_node_is_drained_and_another_one_takes_its_place(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 2, on the burst node, sleeps in its forward passes."""
    monkeypatch.setenv(SLOW, "2:0.2")
    more = {
        "recipe": "tests.integration.slow:SlowGPT",
        "policy": {**RUN_FILE["policy"], "stragglers": {"for_s": 3.0, "drain": True}},
        "deadlines": {**RUN_FILE["deadlines"], "heartbeat_s": 8.0},
    }
    with slurm_run(run_cluster, "straggler", 1, more) as run:
        run.submit()
        run.wait("worker 2", lambda status: 2 in status["workers"], 150.0)
        (slow,) = run.nodes_of("burst")
        run.wait("it to be left", lambda status: 2 not in status["workers"], 90.0)
        run.wait("another one", lambda status: 3 in status["workers"], 150.0)
        (other,) = run.nodes_of("burst")
        assert other != slow
        run.wait_steps(3)
        run.stop()
        (named,) = run.records().stragglers
        assert (named.node, named.worker, named.action) == (slow, 2, "drained")
        (left,) = run.notices("straggling")
        assert (left.node, left.outcome) == (slow, "in time")
        attempts = run.attempts("completed")
        assert all(attempt.digest_equal for attempt in attempts)
        assert any("straggling" in attempt.notice for attempt in attempts)
        each_step_once(run.records())
