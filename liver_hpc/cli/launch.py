"""Hands a run to submitit, from a short-lived process of its own.

submitit starts a local job's controller in the session of the process that submits, and with its
output. Started from here, the run has a session of its own and its output in a file: Ctrl-C, a
closed terminal and `$(liver submit ...)` leave it alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from liver_hpc.config.schema import RunConfig, SlurmSection
from liver_hpc.coordinator.hosting import HostedCoordinator, checkpoint_in_time, requeue
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory

_TIMEOUT_S = 120.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def launch_detached(run: RunDirectory) -> str:
    """Submits the run's coordinator; returns the job id (a process id on the local cluster).

    Ctrl-C does not come between a launch and its job id: it is raised once that is written.
    Raises LiverError with what submitit said.
    """
    log = run.jobs_path / "launch.log"
    cluster = run.config().cluster
    limit_s = _TIMEOUT_S + (cluster.slurm.unreachable_s if cluster.kind == "slurm" else 0.0)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "liver_hpc.cli.launch", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LiverError(f"waited {limit_s:g} s for submitit; see {log}") from None
    except KeyboardInterrupt:
        process.wait(limit_s)
        raise
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise LiverError(f"submitit: {lines[-1] if lines else f'exit code {code}'}; see {log}")
    return run.job_id_path.read_text(encoding="utf-8")


def submit_to_cluster(run: RunDirectory, config: RunConfig) -> str:
    if config.cluster.kind == "slurm":
        from submitit.core.utils import DelayedSubmission

        from liver_hpc.cluster.slurm.submit import submit_call

        call = DelayedSubmission(CoordinatorJob(), str(run.path))
        return submit_call(config.cluster, run, call)
    import submitit

    executor = submitit.LocalExecutor(run.jobs_path)
    executor.update_parameters(timeout_min=config.cluster.timeout_min, stderr_to_stdout=True)
    os.environ["PYTHONSAFEPATH"] = "1"  # -P, which submitit's two processes cannot be given
    devices = os.environ.get(_VISIBLE_DEVICES)
    return str(executor.submit(coordinate_locally, str(run.path), devices).job_id)


class CoordinatorJob:
    """What a Slurm job runs, by submitit's protocol: called, and asked for a checkpoint when the
    job's end is near. submitit pickles it: it holds nothing before it is called."""

    def __init__(self) -> None:
        self._hosted: HostedCoordinator | None = None

    def __getstate__(self) -> dict[str, None]:
        return {"_hosted": None}

    def __call__(self, run_directory: str) -> int:
        """Runs a run's coordinator. Does not return when the job is queued again."""
        from submitit.core.utils import UncompletedJobError

        run = RunDirectory(Path(run_directory))
        hosted = self._hosted = HostedCoordinator(run.path)
        # For submitit SIGTERM is nothing; it is what `scancel` sends.
        signal.signal(signal.SIGTERM, lambda number, frame: hosted.stop("SIGTERM"))
        hosted.start()
        try:
            hosted.wait()
        except UncompletedJobError:  # submitit's way to say that `checkpoint` returned None
            if hosted.outcome is None:
                raise
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        outcome, config = hosted.outcome, run.config()
        if outcome is not None and outcome.goes_on(config):
            _queue_again(config.cluster.slurm)
        if outcome is None or outcome.state == "failed":
            # For Slurm the job has failed, and what depends on its success does not start.
            raise LiverError(outcome.reason if outcome is not None else "there is no outcome")
        return 0

    def checkpoint(self, run_directory: str) -> None:
        """In a signal handler, once the job's end is near. Returns when the run is over, and not at
        all when the job is queued again."""
        run = RunDirectory(Path(run_directory))
        config, hosted = run.config(), self._hosted or HostedCoordinator(run.path)
        if hosted.started:
            checkpoint_in_time(hosted, config.cluster.slurm, os.environ["SLURM_JOB_ID"])
        if hosted.outcome is not None and not hosted.outcome.goes_on(config):
            return
        if config.cluster.slurm.requeue:
            _queue_again(config.cluster.slurm)
        hosted.give_up()


def _queue_again(slurm: SlurmSection) -> NoReturn:
    """By ourselves: submitit would write to the disk first, which may be full."""
    requeue(slurm, os.environ["SLURM_JOB_ID"])
    # Without a result: as far as submitit knows, the job is not over.
    sys.exit(0)


def coordinate_locally(run_directory: str, visible_devices: str | None) -> int:
    """What a local job runs. submitit hides all accelerators from it: they are shown again."""
    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices
    hosted = HostedCoordinator(Path(run_directory))
    # Shortly before the job's time is up it gets SIGUSR2, for which submitit would requeue it or
    # raise: to the coordinator it is a request to stop, as the others are.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: hosted.stop(signal.Signals(number).name))
    hosted.start()
    hosted.wait()
    return int(hosted.outcome is None or hosted.outcome.state == "failed")


def main(arguments: list[str]) -> int:
    run = RunDirectory(Path(arguments[0]))
    run.note_job_id(submit_to_cluster(run, run.config()))
    return 0


if __name__ == "__main__":
    # Under its real name, so that submitit pickles what a job runs by reference.
    from liver_hpc.cli.launch import main as launch_main

    sys.exit(launch_main(sys.argv[1:]))
