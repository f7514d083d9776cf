"""The Slurm job that this process runs in, and whether it is one that was seen before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from liver_hpc.host.files import write_whole

JOB_FILE = "job.json"


class OwnJob(BaseModel):
    """One start of a job. An id alone is not enough: a new cluster begins again at 1, and the
    largest id is followed by the first.

    started: when, as Slurm writes it; empty where it does not. restarts: how often it was queued
    again.
    """

    model_config = ConfigDict(frozen=True)

    job_id: str
    cluster: str = ""
    started: str = ""
    restarts: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> OwnJob | None:
        """None outside of a job."""
        job_id = environment.get("SLURM_JOB_ID", "")
        if not job_id:
            return None
        return cls(
            job_id=job_id,
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
            started=environment.get("SLURM_JOB_START_TIME", ""),
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
        )

    def made(self, run_directory: Path) -> bool:
        """Whether this start of the job, or an earlier one, noted itself in `run_directory`. One
        that was queued again also finds a directory of its name in which nobody has: its first
        start was killed before it could, or was an earlier release's."""
        try:
            noted = OwnJob.model_validate_json((run_directory / JOB_FILE).read_bytes())
        except FileNotFoundError:
            return self.restarts > 0 and run_directory.name.endswith(f"-{self.job_id}")
        except ValidationError:
            return False
        if (noted.job_id, noted.cluster) != (self.job_id, self.cluster):
            return False
        return self.restarts > noted.restarts or self == noted

    @staticmethod
    def noted_s(run_directory: Path) -> float:
        """When a job last noted itself there: of several jobs of one id the last one still runs."""
        path = run_directory / JOB_FILE
        return path.stat().st_mtime if path.exists() else 0.0

    def note(self, run_directory: Path) -> None:
        """Raises OSError."""
        write_whole(run_directory / JOB_FILE, self.model_dump_json() + "\n", mode=0o600)
