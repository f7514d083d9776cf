"""The node pool against a real Slurm: grants, refusals, warnings, an absent controller, ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.cluster.driven import (
    DrivenRun,
    driven,
    processes_with,
    start_controller,
    stop_controller,
    wait_for,
)
from tests.cluster.harness import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

MAIN = {"name": "main", "partition": "stable", "nodes": 1}
MAIN_OPTIONS = ("--partition=stable", "--nodes=1", "--time=10")
BURST = {"partition": "preempt", "max_nodes": 2, "time_min": 10, "backoff_s": 0.5}

IGNORES_TERM = "trap '' TERM; touch $0; while :; do sleep 0.2; done"
"""Touches the file that it is given once nothing but SIGKILL ends it."""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def run(slurm_cluster: SlurmCluster, name: str) -> Iterator[DrivenRun]:
    """One stable node, and up to two burst nodes if somebody wants them."""
    with driven(slurm_cluster, name, {"components": [MAIN], "burst": BURST}) as run:
        run.submit(MAIN_OPTIONS)
        run.start()
        yield run


def occupy(cluster: SlurmCluster, *options: str) -> str:
    """A stable job that takes nodes, from preemptible ones if need be."""
    words = ("sbatch", "--parsable", "--partition=stable", "--output=/dev/null", *options)
    return cluster.run(*words, "--wrap=sleep 600").strip()


def no_jobs_left(run: DrivenRun) -> None:
    wait_for(lambda: not run.burst_jobs(), 20.0, "the burst jobs to end")


def test_components_are_granted_as_the_run_file_says(
    slurm_cluster: SlurmCluster, name: str
) -> None:
    extra = {"name": "extra", "partition": "preempt", "nodes": 2, "join": "asked"}
    slurm = {"components": [MAIN, {**extra, "workers_per_node": 3}]}
    with driven(slurm_cluster, name, slurm) as run:
        run.submit(MAIN_OPTIONS, ("--partition=preempt", "--nodes=2", "--time=10"))
        run.start()
        main, *others = [event["node"] for event in run.told("NodeGranted")]
        assert (main["allocation"], main["slots"], main["preemptible"], main["automatic"]) == (
            ("main", 1, False, True)
        )
        assert {other["allocation"] for other in others} == {"extra"}
        assert [(o["slots"], o["preemptible"], o["automatic"]) for o in others] == [
            (3, True, False)
        ] * 2
        assert len({main["name"], *(other["name"] for other in others)}) == 3


def test_a_cancelled_component_is_warned_of_and_then_gone(
    slurm_cluster: SlurmCluster, name: str
) -> None:
    slurm = {"components": [MAIN, {"name": "extra", "partition": "preempt", "nodes": 1}]}
    with driven(slurm_cluster, name, slurm) as run:
        leader = run.submit(MAIN_OPTIONS, ("--partition=preempt", "--nodes=1", "--time=10"))
        run.start()
        (extra,) = run.told("NodeGranted", allocation="extra")
        node = extra["node"]["name"]
        stands = slurm_cluster.fresh(name) / "stands"
        words = ("sh", "-c", IGNORES_TERM, str(stands))
        slurm_cluster.start("srun", f"--jobid={leader}", "--het-group=1", *words)
        wait_for(stands.exists, 20.0, "the step")
        cancelled_s = time.time()
        run.commands.cancel(f"{leader}+1")
        run.ask("warned", node, "SIGTERM", cancelled_s)
        warning = run.wait_told("NodeWarned", node=node, limit_s=3.0)
        assert warning["reason"] == "cancelled"
        assert warning["deadline_s"] == pytest.approx(cancelled_s + 5.0)  # KillWait
        run.wait_told("NodeGone", node=node)
        assert time.time() - cancelled_s > 4.0, "gone before its processes were"
        assert run.told("NodeGone") == run.told("NodeGone", node=node)
        assert run.told("EndNear") == []


def test_wanted_nodes_are_granted_and_go_back(run: DrivenRun) -> None:
    run.ask("want", 2)
    wait_for(lambda: len(run.told("NodeGranted", burst=True)) == 2, 15.0, "two burst nodes")
    first, second = (event["node"]["name"] for event in run.told("NodeGranted", burst=True))
    run.ask("want", 1)
    run.ask("give_back", first)
    run.wait_told("NodeGone", node=first, limit_s=3.0)
    wait_for(lambda: len(run.burst_jobs()) == 1, 30.0, "one burst job to end")
    assert run.told("NodeGone", node=second) == []
    run.ask("close")
    no_jobs_left(run)


def test_a_late_grant_is_a_grant_and_an_unwanted_request_is_withdrawn(
    slurm_cluster: SlurmCluster, run: DrivenRun
) -> None:
    busy = occupy(slurm_cluster, "--nodes=2")
    run.ask("want", 2)
    wait_for(lambda: len(run.burst_jobs()) == 2, 30.0, "two standing requests")
    run.ask("want", 1)
    wait_for(lambda: len(run.burst_jobs()) == 1, 30.0, "one standing request")
    assert run.told("NodeGranted", burst=True) == []
    run.commands.cancel(busy)
    run.wait_told("NodeGranted", burst=True)
    assert len(run.told("NodeGranted", burst=True)) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        {"partition": "nowhere"},
        pytest.param({"options": {"constraint": "gold"}}, marks=pytest.mark.long),
    ],
)
def test_a_refused_request_is_repeated_ever_more_rarely(
    slurm_cluster: SlurmCluster, name: str, refusal: dict[str, Any]
) -> None:
    burst = {**BURST, **refusal, "max_nodes": 1}
    with driven(slurm_cluster, name, {"components": [MAIN], "burst": burst}) as run:
        run.submit(MAIN_OPTIONS)
        run.start()
        run.ask("want", 1)
        wait_for(lambda: len(run.told("PoolNote")) >= 3, 15.0, "three refusals")
        time_of_third_s = time.monotonic()
        assert all("refused" in event["text"] for event in run.told("PoolNote"))
        wait_for(lambda: len(run.told("PoolNote")) >= 4, 15.0, "another refusal")
        assert time.monotonic() - time_of_third_s > 1.5  # 0.5 s, 1 s, then 2 s
        run.ask("close")
        assert run.burst_jobs() == []


@pytest.mark.parametrize("signalled", [True, False], ids=["signalled", "polled"])
def test_preemption_is_told_with_its_deadline_and_the_node_goes_back(
    slurm_cluster: SlurmCluster, run: DrivenRun, signalled: bool
) -> None:
    run.ask("want", 2)
    wait_for(lambda: len(run.told("NodeGranted", burst=True)) == 2, 15.0, "two burst nodes")
    job_of = {
        e["node"]["name"]: e["node"]["allocation"] for e in run.told("NodeGranted", burst=True)
    }
    run.ask("want", 0)
    asked_s = time.time()
    taker = occupy(slurm_cluster, "--nodes=1")
    # Whom Slurm takes, it alone knows.
    before = {i.job_id: i.ends_s for i in run.commands.jobs(run.burst_jobs()).values()}

    def preempted() -> list[str]:
        jobs = run.commands.jobs(list(before))
        return [i.job_id for i in jobs.values() if (i.ends_s or 0) < time.time() + 60]

    wait_for(lambda: bool(preempted()), 30.0, "a preemption")
    (job,) = preempted()
    (node,) = (node for node, allocation in job_of.items() if allocation == f"burst-{job}")
    if signalled:
        run.ask("warned", node, "SIGTERM", time.time())
    warning = run.wait_told("NodeWarned", node=node, limit_s=3.0)
    assert warning["reason"] == "preempted"
    assert warning["deadline_s"] - asked_s < slurm_cluster.grace_s + 3.0

    def deadlines() -> list[float]:
        return [told["deadline_s"] for told in run.told("NodeWarned", node=node)]

    def told_as_slurm_says() -> bool:
        ends_s = run.commands.jobs([job])[job].ends_s
        return ends_s is not None and abs(deadlines()[-1] - ends_s) < 1.0

    wait_for(told_as_slurm_says, 3.0, "the deadline that Slurm says")
    # Told again only where Slurm has moved it.
    assert all(abs(later - first) > 0.09 for first, later in pairwise(deadlines()))
    assert len(deadlines()) == len(run.told("NodeWarned"))
    run.ask("give_back", node)
    run.wait_told("NodeGone", node=node, limit_s=3.0)

    def taken() -> bool:
        info = run.commands.jobs([taker]).get(taker)
        return info is not None and info.state == "RUNNING"

    wait_for(taken, 30.0, "the other job to run")


def test_a_drained_node_is_told_once_and_is_as_new_when_resumed(
    slurm_cluster: SlurmCluster, run: DrivenRun
) -> None:
    run.ask("want", 1)
    node = run.wait_told("NodeGranted", burst=True)["node"]["name"]
    drain = ("scontrol", "update", f"NodeName={node}")
    slurm_cluster.run(*drain, "State=DRAIN", "Reason=maintenance")
    try:
        warning = run.wait_told("NodeWarned", node=node)
        assert (warning["reason"], warning["deadline_s"]) == ("drained", None)
        time.sleep(4.0)  # two more looks at the nodes
        assert len(run.told("NodeWarned")) == 1
    finally:
        slurm_cluster.run(*drain, "State=RESUME")
    wait_for(lambda: len(run.told("NodeGranted", node=node)) == 2, 30.0, "the node again")


def test_the_end_of_the_own_time_is_told(slurm_cluster: SlurmCluster, name: str) -> None:
    slurm = {"components": [MAIN], "end_window_s": 58.0}
    with driven(slurm_cluster, name, slurm) as run:
        job = run.submit((*MAIN_OPTIONS[:2], "--time=1"))
        run.start()
        end = run.wait_told("EndNear")
        assert end["reason"] == "time limit"
        assert end["deadline_s"] == run.commands.jobs([job])[job].ends_s
        assert run.told("NodeWarned") == []


@pytest.mark.long
def test_a_controller_that_is_away_changes_nothing(
    slurm_cluster: SlurmCluster, run: DrivenRun
) -> None:
    run.ask("want", 1)
    node = run.wait_told("NodeGranted", burst=True)["node"]["name"]
    stop_controller(slurm_cluster)
    try:
        run.wait_told("PoolNote", limit_s=30.0)
        at_s = time.time()
        run.ask("warned", node, "SIGTERM", at_s)
        warning = run.wait_told("NodeWarned", node=node, limit_s=3.0)
        assert time.time() - at_s < 3.0
        assert warning["deadline_s"] == pytest.approx(at_s + slurm_cluster.grace_s)
        run.ask("want", 2)
    finally:
        start_controller(slurm_cluster)
    wait_for(lambda: len(run.told("PoolNote")) >= 2, 30.0, "a word that it answers again")
    notes = [event["text"] for event in run.told("PoolNote")]
    assert "does not answer" in notes[0]
    assert "answers again" in notes[1]
    assert run.told("NodeGone") == []
    wait_for(lambda: len(run.told("NodeGranted", burst=True)) >= 2, 15.0, "what was asked for")
    run.ask("close")
    no_jobs_left(run)


def test_close_leaves_neither_pending_nor_running_jobs(
    slurm_cluster: SlurmCluster, run: DrivenRun
) -> None:
    occupy(slurm_cluster, "--nodes=1")
    run.ask("want", 2)
    run.wait_told("NodeGranted", burst=True)
    wait_for(lambda: len(run.burst_jobs()) == 2, 30.0, "a pending request beside it")
    run.ask("close")
    states = [job.state for job in run.commands.jobs(run.burst_jobs()).values()]
    assert set(states) <= {"COMPLETING"}
    no_jobs_left(run)


def test_a_killed_coordinator_leaves_neither_pending_nor_running_jobs(
    slurm_cluster: SlurmCluster, run: DrivenRun
) -> None:
    occupy(slurm_cluster, "--nodes=1")
    run.ask("want", 2)
    run.wait_told("NodeGranted", burst=True)
    wait_for(lambda: len(run.burst_jobs()) == 2, 30.0, "a pending request beside it")
    run.kill()
    no_jobs_left(run)


@pytest.mark.long
def test_a_keeper_without_a_guard_ends_with_the_coordinator(run: DrivenRun) -> None:
    """As when the whole job of the coordinator is ended, and the guard in it."""
    run.ask("want", 1)
    run.wait_told("NodeGranted", burst=True)
    (job,) = run.burst_jobs()
    log = run.path / "logs" / f"burst-{job}.log"
    wait_for(lambda: log.exists() and "keeps job" in log.read_text(), 20.0, "the keeper")
    record = run.path / "burst.json"
    name = json.loads(record.read_text())["job_name"]
    (guard,) = processes_with("liver_hpc.cluster.slurm.reaper", name)
    guard.kill()
    run.kill()
    no_jobs_left(run)
    assert "waited 3 s for the coordinator" in log.read_text()


def test_the_next_coordinator_has_the_burst_nodes_of_a_killed_one(run: DrivenRun) -> None:
    """Before a controller that does not answer says so."""
    run.ask("want", 1)
    granted = run.wait_told("NodeGranted", burst=True)
    (job,) = run.burst_jobs()
    stop_controller(run.cluster)
    try:
        run.kill()
        run.events.clear()
        began_s = time.monotonic()
        run.start(adopt=True)
        assert run.wait_told("NodeGranted", burst=True) == granted
        assert time.monotonic() - began_s < 10.0
        assert {event["node"]["name"] for event in run.told("NodeGranted")} == run.granted
    finally:
        start_controller(run.cluster)
    time.sleep(4.0)  # longer than a keeper and the guard wait for somebody
    assert run.burst_jobs() == [job]
    assert not run.told("NodeGone")
    run.ask("close")
    no_jobs_left(run)
