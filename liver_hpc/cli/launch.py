"""Hands a run to submitit, from a short-lived process of its own.

submitit starts a local job's controller in the session of the process that submits, and with its
output. Started from here, the run has a session of its own and its output in a file: Ctrl-C, a
closed terminal and `$(liver submit ...)` leave it alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from liver_hpc.cluster.slurm.run_job import requeue
from liver_hpc.config.schema import ClusterSection, RunConfig
from liver_hpc.coordinator.hosting import HostedCoordinator, checkpoint_in_time
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
    """Submits in this process; returns the job id."""
    if config.cluster.kind == "slurm":
        return _submit_to_slurm(run, config)
    import submitit

    executor: Any = submitit.LocalExecutor(run.jobs_path)
    minutes = config.cluster.timeout_min
    executor.update_parameters(timeout_min=minutes, stderr_to_stdout=True)
    devices = os.environ.get(_VISIBLE_DEVICES)
    os.environ["PYTHONSAFEPATH"] = "1"  # -P, which submitit's two processes cannot be given
    return str(executor.submit(coordinate_locally, str(run.path), devices).job_id)


def _submit_to_slurm(run: RunDirectory, config: RunConfig) -> str:
    from liver_hpc.cluster.slurm.executor import HetExecutor
    from liver_hpc.cluster.slurm.script import Submission

    executor = HetExecutor(Submission.of_run(config.cluster, run.path, run.jobs_path))
    return str(executor.submit(CoordinatorJob(), str(run.path)).job_id)


class CoordinatorJob:
    """What a Slurm job runs, by submitit's protocol: called, and asked for a checkpoint when the
    job's end is near. submitit pickles it: it holds nothing before it is called."""

    def __init__(self) -> None:
        self._hosted: HostedCoordinator | None = None

    def __getstate__(self) -> dict[str, None]:
        return {"_hosted": None}

    def __call__(self, run_directory: str) -> int:
        """Lives a run's coordinator; its exit code. Does not return when the job begins again."""
        from submitit.core.utils import UncompletedJobError

        run = RunDirectory(Path(run_directory))
        hosted = self._hosted = HostedCoordinator(run_directory)
        # For submitit SIGTERM is nothing; it is what `scancel` sends.
        signal.signal(signal.SIGTERM, lambda number, frame: hosted.stop("SIGTERM"))
        hosted.start()
        try:
            hosted.wait()
        except UncompletedJobError:  # submitit's way to say that `checkpoint` returned None
            if hosted.exit_code is None:
                raise
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if run.goes_on():
            requeue(run.config().cluster.slurm, os.environ["SLURM_JOB_ID"])
            # Without a result: as far as submitit knows, the job is not over.
            sys.exit(0)
        outcome = run.last_outcome()
        if outcome is None or outcome.state == "failed":
            # For Slurm the job has failed, and what depends on its success does not start.
            raise LiverError(outcome.reason if outcome is not None else "there is no outcome")
        return 0

    def checkpoint(self, run_directory: str) -> Any:
        """The same call, to be queued again; None when the run is over. In a signal handler."""
        from submitit.helpers import DelayedSubmission

        run = RunDirectory(Path(run_directory))
        slurm = run.config().cluster.slurm
        if self._hosted is not None:
            checkpoint_in_time(self._hosted, slurm, os.environ["SLURM_JOB_ID"])
            ended = self._hosted.exit_code is not None
            if ended and not run.goes_on():
                return None
        if not slurm.requeue:
            (self._hosted or HostedCoordinator(run_directory)).give_up()
            return None
        return DelayedSubmission(self, run_directory)


def coordinate(run_directory: str) -> int:
    """What a local job runs."""
    from liver_hpc.coordinator.main import run_coordinator

    # Shortly before the job's time is up it gets SIGUSR2, for which submitit would requeue it or
    # raise: to the coordinator it is a request to stop, as SIGTERM is.
    signal.signal(signal.SIGUSR2, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    return run_coordinator(run_directory)


def coordinate_locally(run_directory: str, visible_devices: str | None) -> int:
    """The same, where submitit hides all accelerators from it: they are shown again."""
    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices
    return coordinate(run_directory)


def resolve_cluster(cluster: ClusterSection) -> tuple[str, list[str]]:
    """ "local" or "slurm" for "auto", and what stands against it.

    "auto" is Slurm where there is sbatch and the run file has components for a job.
    """
    has_slurm = shutil.which("sbatch") is not None
    if cluster.kind == "slurm" and not has_slurm:
        return "slurm", ["cluster slurm: there is no sbatch on the path"]
    if cluster.kind == "auto":
        return ("slurm" if has_slurm and cluster.slurm.components else "local"), []
    return cluster.kind, []


def main(arguments: list[str]) -> int:
    run = RunDirectory(Path(arguments[0]))
    job_id = submit_to_cluster(run, run.config())
    run.note_job_id(job_id)
    return 0


if __name__ == "__main__":
    # Under its real name, so that submitit pickles `coordinate` by reference.
    from liver_hpc.cli.launch import main as launch_main

    sys.exit(launch_main(sys.argv[1:]))
