"""The ends of jobs as Slurm and the run directory show them, and runs that go on from there."""

from __future__ import annotations

import json

import pytest

from liver_hpc.cli import main as cli
from tests.cluster.sites import Site, await_coordinator, await_that, job_of
from tests.unit.checkpoint.disk import Disk
from tests.unit.checkpoint.test_checkpoints import TWO
from tests.unit.layout.models import TIED

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

FAILS = (
    "from liver_hpc.run.outcome import Outcome; end = Outcome('failed', 'no luck', 3); "
    "end.write(run_directory); return end"
)
HANGS = (
    "import pathlib, time; pathlib.Path(run_directory, 'coordinator.json').write_text('{}'); "
    "time.sleep(60.0)"
)


def resume(site: Site, step: int) -> str:
    """The new job of the run that is `latest`."""
    run = (site.directory / "runs" / "latest").resolve()
    before = job_of(run)
    said = site.liver("submit", "--resume", "latest")
    assert said == f"run runs/{run.name} goes on from step {step}\n"
    assert job_of(run) != before
    return job_of(run)


def test_a_stopped_run_goes_on_in_a_new_job_and_only_in_one(site: Site) -> None:
    run = site.submit()
    first = await_coordinator(run)
    running = site.refused("submit", "--resume", "latest", code=cli.EXIT_BAD_INPUT)
    assert f"run runs/{run.name} is not over: job {job_of(run)} is RUNNING" in running
    site.end()
    none = site.refused("submit", "--resume", "latest", code=cli.EXIT_BAD_INPUT)
    assert f"run runs/{run.name} has no checkpoint in {run}/checkpoints to go on from" in none
    assert (run / "outcome.json").exists()

    Disk(TIED, run).save(TWO, 7)
    wrap = ("sbatch", "--parsable", "-pstable", "-N3", "-o/dev/null", "--wrap=exec sleep 300")
    other = site.cluster.run(*wrap).strip()
    await_that(lambda: "RUNNING" in site.jobs(), "the nodes to be taken")
    job = resume(site, step=7)
    queued = site.refused("submit", "--resume", run.name, code=cli.EXIT_BAD_INPUT)
    assert f"run runs/{run.name} is not over: job {job} is PENDING" in queued
    site.cluster.run("scancel", other)
    assert await_coordinator(run) != first
    again = site.refused("submit", "--resume", "latest", code=cli.EXIT_BAD_INPUT)
    assert f"is not over: job {job} is RUNNING" in again
    assert "training, step 7 of 10" in site.liver("status", "latest")
    assert site.end() == f"run runs/{run.name}: stopped at step 7: asked to"
    assert site.job_state(job) == "COMPLETED"
    assert [path.name for path in run.parent.iterdir() if not path.is_symlink()] == [run.name]


def test_the_job_of_a_failed_run_has_failed_and_the_run_can_go_on(site: Site) -> None:
    site.coordinator_begins_with(FAILS)
    run = site.submit()
    job = job_of(run)
    await_that(lambda: not site.jobs(), "the job to be over", 60.0)
    assert site.job_state(job) == "FAILED"
    said = site.liver_fails("status", "latest")
    assert said.startswith(f"run runs/{run.name}: failed at step 3: no luck\n")
    log = (run / "submitit" / f"{job}_0_log.out").read_text()
    assert "LiverError: no luck" in log

    site.coordinator_begins_with("pass")
    Disk(TIED, run).save(TWO, 2)
    resume(site, step=2)
    await_coordinator(run)
    assert site.end() == f"run runs/{run.name}: stopped at step 7: asked to"


@pytest.mark.long
def test_a_job_that_may_not_be_queued_again_fails_when_its_window_was_too_short(
    site: Site,
) -> None:
    site.coordinator_begins_with(HANGS)
    site.write_run(requeue=False, end_window_s=4.0)
    run = site.submit()
    await_that((run / "coordinator.json").exists, "the coordinator", 60.0)
    job = job_of(run)
    site.cluster.run("scancel", "--signal=USR2", "--batch", job)
    await_that(lambda: not site.jobs(), "the job to be over")
    assert site.job_state(job) == "FAILED"
    assert json.loads((run / "outcome.json").read_text()) == {
        "state": "failed",
        "reason": "its job's time was up before its state was on disk",
        "step": 0,
    }
    log = (run / "submitit" / f"{job}_0_log.out").read_text()
    assert "LiverError: its job's time was up before its state was on disk" in log
