"""Submits a run's batch job: submitit makes the call in it, the script is our own, for it knows
neither components nor a Slurm without accounting."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from submitit.core.utils import DelayedSubmission, JobPaths

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


def submit_call(
    cluster: ClusterSection,
    run: RunDirectory,
    call: DelayedSubmission,
    commands: SlurmCommands | None = None,
) -> str:
    """Submits a job of all components; returns its id. `call` is made once, on the first node of
    the first one, and starts steps on the others itself. Raises SlurmError when Slurm refuses."""
    environment = sbatch_environment(os.environ, job_options(cluster, run))
    commands = commands or SlurmCommands(
        cluster.slurm.command_s,
        cluster.slurm.unreachable_s,
        run=partial(run_command, environment=environment),
    )
    script, pickled = run.jobs_path / RUN_SCRIPT, run.jobs_path / "call.pkl"
    script.write_text(batch_script(cluster, run), encoding="utf-8")
    call.set_timeout(cluster.timeout_min, _MOST_REQUEUES)
    call.dump(pickled)
    job_id = submit_once(commands, script, run.path.name)
    JobPaths(run.jobs_path, job_id).move_temporary_file(pickled, "submitted_pickle")
    return job_id


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
