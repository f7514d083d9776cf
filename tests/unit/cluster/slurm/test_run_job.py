"""Which directory is this job's: not every job of the same id is the same job."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.cluster.slurm.run_job import OwnJob


def job(
    job_id: str = "77", cluster: str = "c", started: str = "1000", restarts: str = ""
) -> OwnJob:
    found = OwnJob.of(
        {
            "SLURM_JOB_ID": job_id,
            "SLURM_CLUSTER_NAME": cluster,
            "SLURM_JOB_START_TIME": started,
            "SLURM_RESTART_COUNT": restarts,
        }
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("later", "same"),
    [
        (job(), True),  # the script runs it a second time
        (job(started="2000", restarts="1"), True),
        (job(started="2000"), False),  # the ids have begun again
        (job(started="2000", cluster="d", restarts="1"), False),
        (job(job_id="78", started="2000", restarts="1"), False),
    ],
)
def test_a_job_knows_its_directory_again(tmp_path: Path, later: OwnJob, same: bool) -> None:
    job().note(tmp_path)
    assert later.made(tmp_path) == same


def test_a_second_restart_is_told_from_the_first(tmp_path: Path) -> None:
    job(started="2000", restarts="1").note(tmp_path)
    assert job(started="3000", restarts="2").made(tmp_path)
    assert not job(started="3000", restarts="1").made(tmp_path)


def test_a_note_that_cannot_be_read_is_nobodys(tmp_path: Path) -> None:
    assert not job(restarts="1").made(tmp_path)
    (tmp_path / "job.json").write_text("{")
    assert not job(restarts="1").made(tmp_path)


def test_outside_of_a_job_there_is_none() -> None:
    assert OwnJob.of({}) is None
