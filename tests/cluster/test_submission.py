"""Jobs of several components on a real Slurm: of one call, by `liver submit`, by sbatch.

Where a run is needed its coordinator is a stand-in, which trains nothing.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission, JobPaths

from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.cluster.slurm.submit import submit_call
from liver_hpc.config.schema import ClusterSection
from liver_hpc.run.directory import RunDirectory
from tests.cluster.calls import wait_for
from tests.cluster.harness import REPOSITORY, SlurmCluster, command_line
from tests.cluster.sites import (
    AGAIN_S,
    COMPONENTS,
    Site,
    await_coordinator,
    await_that,
    job_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

# ---- one call


@pytest.fixture
def commands(slurm_cluster: SlurmCluster) -> SlurmCommands:
    """As they are on the control host."""

    def run(words: Any, limit_s: float) -> subprocess.CompletedProcess[str]:
        line = command_line(slurm_cluster.name, "exec", "--", *words)
        return slurm_cluster.attempt(line, limit_s)

    return SlurmCommands(command_s=20.0, unreachable_s=20.0, run=run)


class OddlyNamedRun(RunDirectory):
    """Only what is well quoted keeps its name; in a log's path Slurm takes no backslash."""

    @property
    def jobs_path(self) -> Path:
        return self.path.parent / "submitit"


@pytest.fixture
def run(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> RunDirectory:
    directory = slurm_cluster.fresh(request.node.name)
    made = OddlyNamedRun(directory / """it's "this" run, \\ # $HOME""")
    made.jobs_path.mkdir(parents=True)
    return made


def cluster_section(extra: dict[str, Any]) -> ClusterSection:
    components = [COMPONENTS[0], {**COMPONENTS[1], **extra}]
    setup = [f"export PYTHONPATH={REPOSITORY} SAID='a b'"]
    slurm = {"components": components, "setup": setup}
    return ClusterSection.model_validate({"timeout_min": 5, "slurm": slurm})


def test_a_call_runs_once_in_a_job_of_two_components(
    run: RunDirectory, commands: SlurmCommands, slurm_cluster: SlurmCluster
) -> None:
    end = run.jobs_path / "end"
    call = DelayedSubmission(wait_for, str(end))
    job = submit_call(cluster_section({}), run, call, commands)
    paths = JobPaths(run.jobs_path, job)

    def running() -> list[JobInfo]:
        return [info for info in commands.jobs([job]).values() if info.state == "RUNNING"]

    await_that(lambda: len(running()) == 2, "both components to run")
    await_that((run.jobs_path / "end-awaited").exists, "the call to be made")
    main, extra = sorted(running(), key=lambda info: int(info.job_id))
    assert len(main.nodes) == len(extra.nodes) == 1
    assert main.nodes != extra.nodes
    shown = slurm_cluster.run("squeue", "--noheader", "--format=%j|%k", f"--jobs={job}")
    assert set(shown.splitlines()) == {f"{run.path.name}|liver run {run.path}"}

    end.touch()
    await_that(paths.result_pickle.exists, "the call's result")
    outcome, environment = pickle.loads(paths.result_pickle.read_bytes())
    assert outcome == "success"
    assert environment["SLURM_HET_SIZE"] == "2"
    assert environment["SAID"] == "a b"
    assert "it waits" in paths.stdout.read_text()
    await_that(lambda: not running(), "the job's end")


def test_slurm_says_why_it_refuses(run: RunDirectory, commands: SlurmCommands) -> None:
    wrong = cluster_section({"partition": "nowhere"})
    with pytest.raises(SlurmError, match="invalid partition specified: nowhere"):
        submit_call(wrong, run, DelayedSubmission(wait_for, ""), commands)


# ---- runs


def test_a_submitted_run_is_steered_from_the_login_node(site: Site) -> None:
    """Also one that is submitted from inside of another job."""
    inside = ("SLURM_JOB_ID=999999", "SLURM_NTASKS=7", "SLURM_HET_SIZE=3", "PMI_RANK=4")
    run = site.submit(*inside, "SBATCH_PARTITION=preempt", "SBATCH_EXPORT=NONE")
    assert (site.directory / "runs" / "latest").resolve() == run.resolve()
    job = job_of(run)
    address = await_coordinator(run)
    assert address["hostname"] in {"n1", "n2", "n3"}
    assert {line.split()[1] for line in site.jobs().splitlines()} == {"stable"}
    assert "training, step 7 of 10" in site.liver("status", "latest")
    assert site.end() == f"run runs/{run.name}: stopped at step 7: asked to"
    assert site.jobs() == ""
    log = (run / "submitit" / f"{job}_0_log.out").read_text()
    assert "Job completed successfully" in log


@pytest.fixture
def full(slurm_cluster: SlurmCluster) -> Iterator[str]:
    """All nodes are taken by another job."""
    wrap = ("sbatch", "--parsable", "-pstable", "-N3", "-o/dev/null", "--wrap=exec sleep 300")
    job = slurm_cluster.run(*wrap).strip()
    await_that(lambda: "R" in slurm_cluster.run("squeue", "-h", "-o%t"), "the nodes to be taken")
    yield job
    slurm_cluster.run("scancel", job)


def test_a_queued_run_says_why_and_is_cancelled(site: Site, full: str) -> None:
    run = site.submit()
    job = job_of(run)
    await_that(lambda: "(Resources)" in site.liver("status", "latest"), "the reason to be known")
    said = f"run runs/{run.name}: queued as job {job}: PENDING (Resources)\n"
    assert site.liver("status", "latest") == said
    assert f"queued as job {job}" in site.refused("resize", "latest", "--workers", "4")
    assert site.end() == f"run runs/{run.name}: stopped at step 0: cancelled before it trained"
    assert [line.split()[0] for line in site.jobs().splitlines()] == [full]


def test_following_tells_of_the_queue_and_then_of_the_run(site: Site, full: str) -> None:
    words = site.words(sys.executable, "-m", "liver_hpc", "submit", "--config", "run.yaml")
    following = site.cluster.start(*words, "--follow")
    assert following.stdout is not None
    for _ in COMPONENTS:
        assert "cpus_per_node is not given" in following.stdout.readline()
    assert following.stdout.readline().startswith("run runs/run-")
    assert following.stdout.readline().startswith("queued as job ")
    site.cluster.run("scancel", full)
    assert " is RUNNING on n" in following.stdout.readline()
    run = (site.directory / "runs" / "latest").resolve()
    assert following.stdout.readline() == f"run {run.name}: training\n"
    site.end()
    shown, _ = following.communicate(timeout=30.0)
    assert shown.endswith(": stopped at step 7: asked to\n")
    assert following.returncode == 0


def test_a_coordinator_that_was_killed_is_told_of(site: Site) -> None:
    run = site.submit()
    await_coordinator(run)
    job = job_of(run)
    site.cluster.run("scancel", "--signal=KILL", "--batch", job)
    site.cluster.run("scancel", job)
    await_that(lambda: not site.jobs(), "the job to be over")
    said = site.refused("status", "latest")
    assert f", job {job}) is gone and left no outcome; its logs are" in said


def test_a_warned_job_is_queued_again_by_submitits_protocol(site: Site) -> None:
    run = site.submit()
    first = await_coordinator(run)
    job = job_of(run)
    site.cluster.run("scancel", "--signal=USR2", "--batch", job)
    await_that(lambda: "PENDING" in site.jobs(), "the job to be queued again")
    assert json.loads((run / "outcome.json").read_text())["state"] == "requeue"
    queued = f"queued as job {job}: PENDING"  # its last life may be completing for a moment yet
    await_that(lambda: queued in site.liver("status", "latest"), "the status to say so")

    await_that(lambda: not (run / "outcome.json").exists(), "the run to go on", AGAIN_S)
    second = await_coordinator(run)
    assert second != first
    assert job_of(run) == job
    assert site.end() == f"run runs/{run.name}: stopped at step 7: asked to"
    assert site.jobs() == ""


def test_cancelling_the_job_stops_the_run(site: Site) -> None:
    run = site.submit()
    await_coordinator(run)
    site.cluster.run("scancel", job_of(run))
    await_that((run / "outcome.json").exists, "the outcome")
    assert site.liver("status", "latest") == f"run runs/{run.name}: stopped at step 7: SIGTERM\n"
    await_that(lambda: not site.jobs(), "the job to be over")


def sbatch(site: Site, *overrides: str) -> str:
    script = str(REPOSITORY / "slurm" / "liver.sbatch")
    return site.run("sbatch", "--parsable", *overrides, script, "run.yaml").strip()


def test_the_same_by_sbatch(site: Site) -> None:
    job = sbatch(site, "--nodes=1", "--time=5", ":", "--nodes=1", "--time=5")
    run = site.directory / "runs" / f"run-{job}"
    first = await_coordinator(run)
    assert {line.split()[0] for line in site.jobs().splitlines()} == {f"{job}+0", f"{job}+1"}
    pinned = (run / "run.yaml").read_text()
    (site.directory / "run.yaml").write_text(pinned.replace("steps: 10", "steps: 11"))

    site.cluster.run("scancel", "--signal=USR1", "--batch", job)
    await_that(lambda: "PENDING" in site.jobs(), "the job to be queued again")
    await_that(lambda: not (run / "outcome.json").exists(), "the run to go on", AGAIN_S)
    assert await_coordinator(run) != first
    assert (run / "run.yaml").read_text() == pinned
    assert sorted(path.name for path in run.parent.glob("[!.]*")) == ["latest", run.name]
    assert site.end() == f"run runs/{run.name}: stopped at step 7: asked to"
    said = (site.directory / f"liver-{job}.log").read_text()
    assert said.count(f"run runs/{run.name}\n") == 1
    assert f"run runs/{run.name} goes on when its job starts again" in said
    assert f"run runs/{run.name} goes on, as it began: run.yaml was changed\n" in said
    assert f"run runs/{run.name}: stopped at step 7: asked to\n" in said
    await_that(lambda: not site.jobs(), "the job to be over")
