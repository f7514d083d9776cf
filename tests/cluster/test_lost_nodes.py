"""A node that vanishes from under a run: no word, no closed connection, as if its power was cut."""

from __future__ import annotations

import pytest

from tests.cluster.harness import SlurmCluster
from tests.cluster.slurm_runs import slurm_run, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SILENT_S = 4.0
SECTIONS = {
    "snapshots": {"every_steps": 1},
    "deadlines": {"heartbeat_s": SILENT_S},
    "checkpoint": {"every_steps": None},
}


def test_a_run_goes_on_without_a_node_that_has_vanished(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker's share is held on the other node. Slurm itself learns of it later."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    with slurm_run(run_cluster, "lossy", 0, SECTIONS) as run:
        run.submit()
        run.wait_workers(2)
        run.wait_steps(5)
        (node,) = run.nodes_of("spare")
        run_cluster.testbed("kill-node", node)
        try:
            run.wait_workers(1)
            run.wait_steps(5)
            (recovery,) = run.records().recoveries
            assert (recovery.source, recovery.target) == ("tp1 pp1 dp2", "tp1 pp1 dp1")
            assert recovery.steps_redone <= 1
            assert "silent" in recovery.reason
            assert "stopped" in run.stop()
        finally:
            run_cluster.testbed("start-node", node)
        wait_for(lambda: not run.jobs.of_runs(), 60.0, "the job to end")
