"""A run on a real Slurm whose nodes come and go: one run, one kind of event after the other.

Every test begins with a run on all the nodes that it can have, whatever the one before has left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from liver_hpc.run.records import NoticeRecord
from tests.cluster.harness import SlurmCluster, command_line
from tests.cluster.slurm_runs import (
    ENDLESS,
    GONE_S,
    RUN_FILE,
    SlurmRun,
    each_step_once,
    slurm_run,
    wait_for,
)
from tests.integration.runs import finish, kill_started, run_config, start

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

STEP_S = "0.2"
"""What a step takes at least while joiners boot beside it."""
STEP_REPEATED_S = 60.0
"""When slurmstepd says again that a step has ended, if slurmctld did not hear of it."""
COMPARED_STEPS = 100


class Runs:
    """The run that all tests share, until one of them is tried again: that one gets a new run, as
    the first try may have left the old one without the nodes that it is about."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._open = ExitStack()
        self._number = 0

    def new(self) -> SlurmRun:
        """Two stable nodes, a component each, and up to two burst nodes."""
        self.close()
        self._number += 1
        run = self._open.enter_context(slurm_run(self._cluster, f"elastic{self._number}", 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIVER_TEST_STEP_S", STEP_S)
            run.submit()
        self.run = run
        return run

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def runs(run_cluster: SlurmCluster) -> Iterator[Runs]:
    runs = Runs(run_cluster)
    runs.new()
    yield runs
    runs.close()


@pytest.fixture
def run(runs: Runs, request: pytest.FixtureRequest) -> SlurmRun:
    tried_before = getattr(request.node, "execution_count", 1) > 1
    return runs.new() if tried_before else runs.run


def the_notice(run: SlurmRun, kind: str, node: str) -> NoticeRecord:
    """The last such notice, once it is over."""

    def over() -> bool:
        return any(notice.node == node for notice in run.notices(kind))

    wait_for(over, 30.0, f"notice {kind} of {node} to be over")
    return next(notice for notice in reversed(run.notices(kind)) if notice.node == node)


def test_a_run_grows_onto_burst_nodes_and_leaves_one_in_its_grace_time_and_in_boot(
    run: SlurmRun,
) -> None:
    """Warned in the middle of a handoff onto the node, it aborts that; the source trains on."""
    run.wait_workers(4)
    grown = run.attempts("completed")[0]
    assert (grown.source, grown.target) == ("tp1 pp1 dp2", "tp2 pp1 dp2")
    assert "nodes granted" in grown.notice
    node = run.nodes_of("burst")[-1]
    known = len(run.notices("preempted"))
    with run.jobs.occupying(node) as other:
        run.wait_workers(3)
        notice = the_notice(run, "preempted", node)
        assert notice.outcome == "in time"
        assert notice.left_s < notice.deadline_s
        assert math.isfinite(notice.returned_s)
        wait_for(lambda: run.jobs.runs(other), 20.0, "the other job to run")

    before = run.wait_phase("BOOT", "PREPARE")
    assert run.holds(before, node)
    with run.jobs.occupying(node):
        run.wait(f"{node} to be left", lambda status: not run.holds(status, node), 30.0)
        after = run.wait_workers(3)
        assert (after["workers"], after["generation"]) == (before["workers"], before["generation"])
        first, second = run.wait_notices("preempted", known + 2)[known:]
        assert (first.node, first.outcome) == (second.node, second.outcome) == (node, "in time")
        assert "nodes granted" in run.attempts("aborted")[0].notice


def test_a_node_is_left_and_training_goes_on_while_slurmctld_is_gone(run: SlurmRun) -> None:
    run.wait_workers(4)
    node = run.nodes_of("burst")[-1]
    run.cluster.testbed("kill-controller")
    try:
        run.wait_log("controller does not answer")
        assert f"leaving {node}" in run.liver("drain", str(run.directory.path), node)
        run.wait_workers(3)
        run.wait_steps(5)
        assert run.holds(run.status, node), "returned to nobody"
    finally:
        run.cluster.testbed("start-controller")
    # Slurm keeps it until it is told once more that the step there has ended.
    with ExitStack() as failing:
        failing.enter_context(run.jobs.occupying(node))
        run.wait_log("controller answers again")
        run.wait(f"{node} to be given back", lambda status: not run.holds(status, node), 60.0)
        assert the_notice(run, "operator", node).outcome == "in time"
        failing.pop_all()  # the run stays without that node


def test_a_drained_node_is_left_and_taken_again(run: SlurmRun) -> None:
    workers = run.wait_workers(3, or_more=True)["workers"]
    node = run.nodes_of("burst")[0]
    run.jobs.update(f"NodeName={node}", "State=DRAIN", "Reason=maintenance")
    try:
        run.wait(f"{node} to be left", lambda status: not run.holds(status, node), 60.0)
        run.wait_workers(len(workers) - 1)
        notice = the_notice(run, "drained", node)
        assert notice.outcome == "in time"
        assert notice.action.startswith("live to ")
    finally:
        run.jobs.update(f"NodeName={node}", "State=RESUME")
    run.wait_workers(len(workers))
    assert run.holds(run.status, node)


def test_a_cancelled_component_is_left_before_it_is_killed(run: SlurmRun) -> None:
    run.wait_workers(3, or_more=True)
    (node,) = run.nodes_of("spare")
    run.cluster.run("scancel", f"{run.job}+1")
    # The node itself may come again, as a burst node.
    run.wait("spare to be left", lambda status: not run.nodes_of("spare"), 60.0)
    notice = the_notice(run, "cancelled", node)
    assert (notice.outcome, notice.action[:8]) == ("in time", "live to ")
    assert notice.deadline_s - notice.at_s == pytest.approx(run.cluster.kill_wait_s)
    run.wait_steps(3)


def test_no_step_was_repeated_and_nothing_is_left(run: SlurmRun, tmp_path: Path) -> None:
    """The losses are those of one worker that trains undisturbed, without Slurm."""
    run.wait_steps(1)
    run.stop()
    losses = each_step_once(run.records())
    completed, aborted = run.attempts("completed"), run.attempts("aborted")
    assert completed
    assert len(completed + aborted) == len(run.records().reconfigurations)
    assert all(attempt.digest_equal for attempt in completed)
    outcomes = {notice.outcome for notice in run.records().notices}
    assert outcomes <= {"in time", "in use", "not needed"}
    try:
        steps = min(len(losses), COMPARED_STEPS)
        sections = {name: RUN_FILE[name] for name in ("schedule", "handoff")}
        config = run_config(
            tmp_path,
            steps,
            initial=1,
            train={**RUN_FILE["train"], "steps": steps},
            workers={"max": 1},
            layouts={1: [{"dp": 1}]},
            **sections,
        )
        fixed = [record.loss for record in finish(start(config)).steps]
    finally:
        kill_started()
    assert len(fixed) == steps < ENDLESS
    assert losses[:steps] == pytest.approx(fixed, rel=1e-4)
    run.nothing_is_left(STEP_REPEATED_S + GONE_S)


def test_no_accounting_was_needed(run_cluster: SlurmCluster) -> None:
    words = command_line(run_cluster.name, "exec", "--", "sacct")
    done = run_cluster.attempt(words, limit_s=30.0)
    assert done.returncode != 0
    assert "accounting storage is disabled" in done.stdout + done.stderr


@pytest.mark.long
def test_a_burst_node_that_is_not_well_goes_back_and_another_one_is_used(
    run_cluster: SlurmCluster,
) -> None:
    """Which of the two it is tells Slurm first; the check knows only its name."""
    check = "test $SLURMD_NODENAME != n4 || { echo GPU 3 has fallen off; exit 9; }"
    with slurm_run(run_cluster, "checked", 2, health_check=check) as run:
        run.submit()
        run.wait_workers(3)
        run.wait_log("node n4 is gone: ")
        run.wait_steps(5)
        assert "fails its health check (exit code 9): GPU 3 has fallen off" in run.log()
        assert run.nodes_of("burst") == ["n3"]
        run.stop()
        run.nothing_is_left()


@pytest.mark.long
def test_a_run_does_not_start_on_a_node_that_is_not_well(run_cluster: SlurmCluster) -> None:
    check = "test $SLURMD_NODENAME != n2 || { echo no scratch; exit 1; }"
    with slurm_run(run_cluster, "unwell", 0, health_check=check) as run:
        run.submit()
        wait_for(lambda: run.directory.outcome() is not None, 120.0, "the run to fail")
        outcome = run.directory.outcome()
        assert outcome is not None
        assert outcome.state == "failed"
        assert "fails its health check (exit code 1): no scratch" in outcome.reason
        run.nothing_is_left()
