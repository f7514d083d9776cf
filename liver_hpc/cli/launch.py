"""The short-lived process that hands a run to submitit, and what submitit starts.

submitit starts a local job's controller in the session of the process that submits, and with its
output. Started from here, the run has a session of its own and its output in a file: Ctrl-C, a
closed terminal and `$(liver submit ...)` leave it alone.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from liver_hpc.cli.run_here import JobSignals
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.hosting import HostedCoordinator, requeue
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def submit_to_cluster(run: RunDirectory, config: RunConfig) -> str:
    executor: Any
    if config.cluster.kind == "slurm":
        from liver_hpc.cluster.slurm.executor import HetExecutor
        from liver_hpc.cluster.slurm.script import Submission

        executor = HetExecutor(Submission.of_run(config.cluster, run.path, run.jobs_path))
        return str(executor.submit(CoordinatorJob(), str(run.path)).job_id)
    import submitit

    executor = submitit.LocalExecutor(run.jobs_path)
    executor.update_parameters(timeout_min=config.cluster.timeout_min, stderr_to_stdout=True)
    os.environ["PYTHONSAFEPATH"] = "1"  # -P, which submitit's two processes cannot be given
    devices = os.environ.get(_VISIBLE_DEVICES)
    return str(executor.submit(coordinate_locally, str(run.path), devices).job_id)


class CoordinatorJob:
    """What a Slurm job runs, by submitit's protocol: called, or asked for a checkpoint where the
    job's end is near before that."""

    def __call__(self, run_directory: str) -> int:
        """Runs a run's coordinator. Does not return when the job is queued again."""
        signals = JobSignals()
        signals.listen()  # in the place of submitit, which knows no end but its own
        outcome = signals.coordinate(RunDirectory(Path(run_directory)))
        if outcome is None:
            sys.exit(0)  # without a result: as far as submitit knows, the job is not over
        if outcome.state == "failed":
            # For Slurm the job has failed, and what depends on its success does not start.
            raise LiverError(outcome.reason)
        return 0

    def checkpoint(self, run_directory: str) -> None:
        """In a signal handler. Does not return when the job is queued again: by ourselves, for
        submitit would write to the disk first, which may be full."""
        run = RunDirectory(Path(run_directory))
        slurm = run.config().cluster.slurm
        if slurm.requeue:
            requeue(slurm, os.environ["SLURM_JOB_ID"])
            sys.exit(0)
        HostedCoordinator(run.path).give_up()


def coordinate_locally(run_directory: str, visible_devices: str | None) -> int:
    """What a local job runs. submitit hides all accelerators from it: they are shown again."""
    from liver_hpc.coordinator.main import run_coordinator

    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices
    # Shortly before the job's time is up it gets SIGUSR2, for which submitit would requeue it or
    # raise: to the coordinator it is a request to stop, as SIGTERM is.
    signal.signal(signal.SIGUSR2, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    return int(run_coordinator(Path(run_directory)).state == "failed")


def main(arguments: list[str]) -> int:
    run = RunDirectory(Path(arguments[0]))
    run.note_job_id(submit_to_cluster(run, run.config()))
    return 0


if __name__ == "__main__":
    # Under its real name, so that submitit pickles what a job runs by reference.
    from liver_hpc.cli.launch import main as launch_main

    sys.exit(launch_main(sys.argv[1:]))
