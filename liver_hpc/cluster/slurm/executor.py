"""submitit for heterogeneous jobs: one batch job of several components.

submitit knows neither components nor a Slurm without accounting: of the job that it returns only
the id is of use, for its states are sacct's.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands, run_command
from liver_hpc.cluster.slurm.script import (
    RUN_SCRIPT,
    batch_script,
    job_options,
    sbatch_environment,
)
from liver_hpc.config.schema import ClusterSection
from liver_hpc.run.directory import RunDirectory

_MOST_REQUEUES = 1_000_000
"""A run that makes no progress ends by itself; submitit need not count."""


class HetExecutor(SlurmExecutor):
    """Submits a call as a heterogeneous job; it runs once, on the first node of the first
    component, and starts steps on the others itself.

    All options come from the run file: there is nothing to update. `submit` raises SlurmError
    when Slurm refuses.
    """

    def __init__(
        self, cluster: ClusterSection, run: RunDirectory, commands: SlurmCommands | None = None
    ) -> None:
        super().__init__(run.jobs_path, max_num_timeout=_MOST_REQUEUES)
        self._cluster = cluster
        self._run = run
        environment = sbatch_environment(os.environ, job_options(cluster, run))
        self._commands = commands or SlurmCommands(
            cluster.slurm.command_s,
            cluster.slurm.unreachable_s,
            run=partial(run_command, environment=environment),
        )
        self.parameters["time"] = cluster.timeout_min

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        script = self._run.jobs_path / RUN_SCRIPT
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(batch_script(self._cluster, self._run), encoding="utf-8")
        job_id = submit_once(self._commands, script, self._run.path.name)
        return SlurmJob(folder=self.folder, job_id=job_id)


def submit_once(commands: SlurmCommands, script: Path, name: str) -> str:
    """Submits a script whose job's name is its own alone; returns the job id.

    A controller that does not answer may have taken the job all the same: before another attempt
    it is asked for a job of that name.
    """
    try:
        return commands.once().sbatch([], script)
    except ControllerUnreachable:
        queued = commands.named(name)  # returns once the controller is back
    if not queued:
        return commands.sbatch([], script)
    first = min(queued.values(), key=lambda info: int(info.job_id))
    return first.het_leader or first.job_id
