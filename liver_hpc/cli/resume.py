"""`liver submit --resume RUN`: an ended run goes on from its newest checkpoint, in a new job."""

from __future__ import annotations

from liver_hpc.checkpoint.index import checkpoint_directory
from liver_hpc.cli.launch import launch_detached
from liver_hpc.cli.submission import await_coordinator
from liver_hpc.cluster.slurm.run_job import job_of
from liver_hpc.coordinator.checkpoints import newest_checkpoint
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.file_lock import file_lock
from liver_hpc.run.directory import RunDirectory, point_latest, process_lives
from liver_hpc.run.outcome import COORDINATOR_FILE, OUTCOME_FILE


def resume_run(run: RunDirectory) -> int:
    """Launches the run again in its directory; the step from which it goes on.

    Raises ConfigError for a run that is still there, that is complete, or that has no checkpoint;
    CheckpointError when that is damaged; LiverError when the launch failed.
    """
    with file_lock(run.jobs_path / "resume.lock"):  # whoever comes second finds the job
        return _resume(run)


def _resume(run: RunDirectory) -> int:
    config, last = run.config(), run.last_outcome()
    _check_over(run)
    if last is not None and last.state == "finished":
        raise ConfigError(f"run {run} is complete: {last.reason}")
    directory = checkpoint_directory(config, run.path)
    newest = newest_checkpoint(directory)
    if newest is None:
        raise ConfigError(
            f"run {run} has no checkpoint in {directory} to go on from; `liver stop --checkpoint` "
            "and `checkpoint.every_steps` write one"
        )
    for name in (OUTCOME_FILE, COORDINATOR_FILE):
        (run.path / name).unlink(missing_ok=True)
    try:
        launch_detached(run)
    except LiverError:
        if last is not None:
            last.write(run.path)
        raise
    point_latest(run)
    if config.cluster.kind == "local":
        await_coordinator(run)
    return newest.index.scalars.step


def _check_over(run: RunDirectory) -> None:
    """Two coordinators in one directory would each write its files."""
    job, process, address = job_of(run), run.job_id(), run.coordinator()
    if job is not None:
        info = job.find()
        if info is not None:
            raise ConfigError(f"run {run} is not over: job {job.job_id} is {info.state}")
        return
    pids = [int(process)] if process else []
    pids += [address.pid] if address is not None else []
    if address is not None and not address.is_here:
        raise ConfigError(
            f"run {run} may not be over: its coordinator was process {address.pid} on "
            f"{address.hostname}, which is where it can be resumed"
        )
    living = [pid for pid in pids if process_lives(pid)]
    if living:
        raise ConfigError(f"run {run} is not over: process {living[0]} lives")
