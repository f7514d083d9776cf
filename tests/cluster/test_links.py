"""A node whose link is slow, or out for a while, or for good, while everything on it lives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.harness import SlurmCluster
from tests.cluster.slurm_runs import MAIN, SPARE, SlurmRun, slurm_run, wait_for
from tests.cluster.test_lost_nodes import COMPONENTS, SECTIONS, SILENT_S

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(300)]

LIMITED = "n3"


@pytest.fixture(autouse=True)
def mended(run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    yield
    run_cluster.testbed("limit", LIMITED)


def four_nodes(run: SlurmRun) -> None:
    run.submit()
    run.wait_workers(4)
    run.wait_steps(5)
    assert LIMITED in run.nodes_of("spare")


def test_a_link_that_is_out_for_less_than_silence_is_borne_costs_nobody(
    run_cluster: SlurmCluster,
) -> None:
    with slurm_run(run_cluster, "cut", 0, SECTIONS, components=COMPONENTS) as run:
        four_nodes(run)
        run_cluster.testbed("limit", LIMITED, "--down")
        time.sleep(SILENT_S / 3)
        run_cluster.testbed("limit", LIMITED)
        run.wait_steps(10)
        assert run.records().recoveries == []
        run.stop()


def test_who_is_behind_a_link_that_stays_out_is_lost_and_ends_by_itself(
    run_cluster: SlurmCluster,
) -> None:
    """Once the link is back, Slurm's daemon and a new agent are there, and the run grows back."""
    with slurm_run(run_cluster, "out", 0, SECTIONS, components=COMPONENTS) as run:
        four_nodes(run)
        run_cluster.testbed("limit", LIMITED, "--down")
        run.wait_workers(3)
        run.wait_steps(5)
        (recovery,) = run.records().recoveries
        assert recovery.steps_redone <= 1
        run_cluster.testbed("limit", LIMITED)
        run.wait_workers(4)
        run.wait_steps(5)
        run.stop()


def test_a_handoff_over_a_link_of_a_megabit_takes_its_time_or_is_called_off(
    run_cluster: SlurmCluster,
) -> None:
    sections = SECTIONS | {"workers": {"initial": 2, "max": 4}, "deadlines": {"transfer_s": 60.0}}
    sections |= {"layouts": {4: [{"tp": 2, "dp": 2}], 2: [{"dp": 2}]}}
    asked = [{**MAIN, "nodes": 2}, {**SPARE, "nodes": 2, "join": "asked"}]
    with slurm_run(run_cluster, "slow", 0, sections, components=asked) as run:
        run.submit()
        run.wait_workers(2)
        run.wait_steps(3)
        run_cluster.testbed("limit", LIMITED, "--rate", "1mbit")
        run.liver("resize", str(run.directory.path), "--workers", "4")

        def over() -> bool:
            return bool(run.records().reconfigurations)

        wait_for(over, 150.0, "the handoff over the slow link")
        (row,) = run.records().reconfigurations
        assert row.outcome in ("completed", "aborted"), row
        assert row.outcome == "aborted" or row.digest_equal
        run_cluster.testbed("limit", LIMITED)
        run.wait_steps(5)
        run.stop()
