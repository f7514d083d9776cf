"""A node that vanishes from under a run: no word, no closed connection, as if its power was cut."""

from __future__ import annotations

import re

import pytest

from liver_hpc.cluster.slurm.orphaned import ENVIRONMENT_FILE
from tests.cluster.harness import SlurmCluster
from tests.cluster.slurm_runs import MAIN, SPARE, slurm_run, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SILENT_S = 4.0
SECTIONS = {
    "workers": {"initial": 4, "max": 4},
    "layouts": {4: [{"dp": 4}], 3: [{"dp": 3}]},
    "snapshots": {"every_steps": 1},
    "deadlines": {"heartbeat_s": SILENT_S},
    "checkpoint": {"every_steps": None},
}
COMPONENTS = [{**MAIN, "nodes": 2}, {**SPARE, "nodes": 2}]
"""Slurm ends a job of which a component loses its only node."""


def test_a_run_goes_on_without_a_node_that_has_vanished(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker's share is held on another node. Slurm itself learns of it later, and lets the job
    go on."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    with slurm_run(run_cluster, "lossy", 0, SECTIONS, components=COMPONENTS) as run:
        run.submit()
        run.wait_workers(4)
        run.wait_steps(5)
        node = run.nodes_of("spare")[0]
        run_cluster.testbed("kill-node", node)
        try:
            run.wait_workers(3)
            run.wait_steps(5)
            (recovery,) = run.records().recoveries
            assert (recovery.source, recovery.target) == ("tp1 pp1 dp4", "tp1 pp1 dp3")
            assert recovery.steps_redone <= 1
            assert "silent" in recovery.reason
            log = run.directory.path / "logs" / "coordinator.log"
            known = f"node {node} is gone"
            wait_for(lambda: known in log.read_text(encoding="utf-8"), 90.0, known)
            run.wait_steps(10)
            run.stop()
        finally:
            run_cluster.testbed("start-node", node)
        wait_for(lambda: not run.jobs.of_runs(), 60.0, "the job to end")


@pytest.mark.long
def test_a_run_goes_on_live_without_the_node_of_its_coordinator(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent has another coordinator begin on its node; what is lost is made good from memory,
    long before Slurm drops the node. The run ends as any other, and so does its job."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    sections = {**SECTIONS, "deadlines": {"heartbeat_s": SILENT_S, "coordinator_s": 30.0}}
    with slurm_run(run_cluster, "beheaded", 0, sections, components=COMPONENTS) as run:
        run.submit()
        run.wait_workers(4)
        run.wait_steps(5)
        spoke, (node, *_) = run.speaker(), run.nodes_of("main")
        assert spoke.startswith(f"{node}:")
        run_cluster.testbed("kill-node", node)
        try:
            wait_for(lambda: run.speaker() not in ("", spoke), 100.0, "another coordinator")
            run.wait_workers(3)
            run.wait_steps(5)
            (recovery,) = run.records().recoveries
            assert (recovery.source, recovery.target) == ("tp1 pp1 dp4", "tp1 pp1 dp3")
            assert recovery.steps_redone <= 1
            assert not re.search("goes on from step|restart:", run.log())
            run.stop()
            wait_for(lambda: not run.jobs.of_runs(), 90.0, "the job to end")
        finally:
            run_cluster.testbed("start-node", node)


@pytest.mark.long
def test_a_run_whose_batch_script_went_with_its_node_begins_again(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm lets the job go on with the node that is left. Where no coordinator can begin there,
    nothing trains any more; the agent has the job queued again."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    sections = {
        "workers": {"initial": 2, "max": 2},
        "layouts": {2: [{"dp": 2}]},
        "checkpoint": {"every_steps": 10},
        "deadlines": {"heartbeat_s": SILENT_S, "coordinator_s": 5.0},
    }
    components = [{**MAIN, "nodes": 2}]
    with slurm_run(run_cluster, "headless", 0, sections, components=components) as run:
        run.submit()
        run.wait_workers(2)
        run.wait_steps(20)
        spoke, (node, *_) = run.speaker(), run.nodes_of("main")
        assert spoke.startswith(f"{node}:")
        (run.directory.path / ENVIRONMENT_FILE).unlink()
        run_cluster.testbed("kill-node", node)
        try:
            wait_for(lambda: run.speaker() not in ("", spoke), 200.0, "the job to begin again")
            run.wait_workers(2)
            assert node not in run.nodes_of("main")
            assert re.search(r"goes on from step [1-9]\d*, saved at tp1 pp1 dp2", run.log())
            run.stop()
        finally:
            run_cluster.testbed("start-node", node)
        wait_for(lambda: not run.jobs.of_runs(), 60.0, "the job to end")
