"""The end of a run's own job: of its time, of its coordinator, of all of it at once."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pytest

from liver_hpc.report.hours import held_spans, overlap_s
from liver_hpc.run.entries import JOURNAL_FILE
from tests.cluster.harness import SlurmCluster
from tests.cluster.slurm_runs import (
    BOOT_S,
    BURST,
    GONE_S,
    SLURM,
    SlurmRun,
    each_step_once,
    longest_gap_s,
    slurm_run,
    wait_for,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PARTITION = "PartitionName=preempt"
STOPS = b'"stop_signalled"'


@pytest.fixture(autouse=True)
def paced(run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.2")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    yield
    run_cluster.run("scontrol", "update", PARTITION, "State=UP", "MaxTime=UNLIMITED")


def end_the_time(run: SlurmRun) -> None:
    """The job's time is about to be up; returns once it has begun again, with more of it."""
    spoke = run.speaker()
    end = f"EndTime=now+{int(run.slurm['end_window_s']) + 4}"
    run.jobs.update(f"JobId={run.job}", end)
    wait_for(run.goes_on, BOOT_S, "the state to be on disk")
    wait_for(lambda: run.speaker() not in ("", spoke), BOOT_S, "the job to begin again")
    run.jobs.update(f"JobId={run.job}", "TimeLimit=20")


def goes_on_where_it_was_saved(run: SlurmRun) -> None:
    (saved,) = re.findall(r"requeue: .*checkpoint of step (\d+) in", run.log())
    (resumed,) = re.findall(r"goes on from step (\d+)", run.log())
    assert saved == resumed


@pytest.mark.long
def test_a_run_goes_on_where_its_time_ended_on_the_nodes_that_are_left(
    run_cluster: SlurmCluster,
) -> None:
    """By submitit; then SIGKILL of the coordinator."""
    with slurm_run(run_cluster, "requeued") as run:
        run.submit()
        run.wait_workers(3)
        run.jobs.update(PARTITION, "State=DOWN")
        end_the_time(run)
        run.wait_workers(2)
        goes_on_where_it_was_saved(run)
        run.kill_coordinator()
        run.nothing_is_left()
        each_step_once(run.records())


@pytest.mark.long
def test_a_script_of_ones_own_goes_on_likewise_and_a_refused_request_delays_nothing(
    run_cluster: SlurmCluster,
) -> None:
    """By slurm/liver.sbatch; a late grant; then SIGKILL of all processes of the job."""
    with slurm_run(run_cluster, "scripted", burst={**BURST, "backoff_max_s": 3.0}) as run:
        run.jobs.update(PARTITION, "MaxTime=5")  # burst nodes are asked for for longer
        options = ["--partition=stable", "--nodes=1", "--time=20", "--output=/dev/null"]
        options.append(f"--signal=B:USR1@{SLURM['end_window_s']:.0f}")
        run.submit_script(*options, ":", *options)
        run.wait_workers(2)
        run.wait_log("refused")
        run.wait_steps(5)
        assert longest_gap_s(run.records()) < 2.0
        end_the_time(run)
        run.wait_workers(2)
        goes_on_where_it_was_saved(run)
        run.jobs.update(PARTITION, "MaxTime=UNLIMITED")
        run.wait_workers(3)
        run.cluster.run("scancel", "--signal=KILL", "--full", run.job)
        run.nothing_is_left()
        each_step_once(run.records())


@pytest.mark.long
def test_a_killed_coordinator_is_followed_by_another_one_and_no_step_is_lost(
    run_cluster: SlurmCluster,
) -> None:
    """In the same job; the burst node that was granted meanwhile stays, and is left in the end."""
    with slurm_run(run_cluster, "taken-over") as run:
        run.submit()
        run.wait_workers(3)
        job = run.job
        run.kill_coordinator(and_its_parent=False)
        run.wait_log("has taken over; it misses nobody")
        status = run.wait_workers(3)
        run.wait_steps(5)
        assert run.job == job
        run.stop()
        run.nothing_is_left()
        each_step_once(run.records())
        assert "goes on from step" not in run.log()
        assert run.records().steps[-1].step >= status["step"] + 5


def cut_off(run: SlurmRun, *by: str) -> float:
    """Slurm tells the job to end, by this command, and kills it as the run stops: when."""
    journal = run.directory.path / JOURNAL_FILE
    stops = journal.read_bytes().count(STOPS)
    run.cluster.run(*by)
    wait_for(lambda: journal.read_bytes().count(STOPS) > stops, GONE_S, "the run to stop")
    run.kill_all()  # as after KillWait
    killed_s = time.time()
    assert run.directory.last_outcome() is None, "it had stopped before"
    wait_for(lambda: not run.processes() + run.jobs.steps(), GONE_S, "the job to be gone")
    return killed_s


@pytest.mark.long
def test_a_stop_that_was_cut_off_ends_no_later_start_and_costs_no_nodes_while_it_waits(
    run_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its job, which is queued again and held for a while; then in another one."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "2.0")
    with slurm_run(run_cluster, "cut-off", 0, {"checkpoint": {"every_steps": 2}}) as run:
        run.submit()
        run.wait_workers(2)
        first = run.job
        waits = [(cut_off(run, "scontrol", "requeuehold", first), time.time())]
        run.cluster.run("scontrol", "release", first)
        run.wait_workers(2)
        assert run.job == first

        killed_s = cut_off(run, "scancel", first)
        wait_for(lambda: not run.jobs.of_runs(), GONE_S, "the job to end")
        waits.append((killed_s, time.time()))
        run.resume()
        run.wait_workers(2)
        assert run.job != first
        run.stop()
        run.nothing_is_left()

        assert len(re.findall("goes on from step [1-9]", run.log())) == len(waits)
        assert "has taken over" not in run.log()
        records = run.records()
        assert {record.step for record in records.steps} == set(range(records.steps[-1].step + 1))
        held = held_spans(records.holdings)
        assert len(held) == 1 + len(waits)
        assert [overlap_s(held, *wait) for wait in waits] == [0.0, 0.0]


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_in_a_new_job(run_cluster: SlurmCluster) -> None:
    """From the checkpoint of its last step."""
    with slurm_run(run_cluster, "resumed", burst_nodes=0) as run:
        run.submit()
        run.wait_workers(2)
        first = run.job
        stopped = run.stop("--checkpoint")
        found = re.search(r"stopped at step (\d+): .*checkpoint of step (\d+) in", stopped)
        assert found is not None, stopped
        done, saved = map(int, found.groups())
        assert done == saved == len(run.records().steps)

        assert f"goes on from step {saved}\n" in run.resume()
        assert run.job != first
        refused = run.refused("submit", "--resume", str(run.directory.path))
        assert re.search(rf"is not over: job {run.job} is (PENDING|RUNNING)", refused), refused
        status = run.wait_workers(2)
        assert status["step"] >= saved + 3
        assert f"goes on from step {saved}, " in run.log()
        run.stop()
        run.nothing_is_left()
        each_step_once(run.records())
