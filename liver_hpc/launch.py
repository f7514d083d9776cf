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

from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.run_directory import RunDirectory

_TIMEOUT_S = 120.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def launch_detached(run: RunDirectory) -> str:
    """Submits the run's coordinator; returns the job id (a process id on the local cluster).

    Raises LiverError with what submitit said.
    """
    log = run.jobs_path / "launch.log"
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                [sys.executable, "-m", "liver_hpc.launch", str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        raise LiverError(f"waited {_TIMEOUT_S:g} s for submitit; see {log}") from None
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise LiverError(f"submitit: {lines[-1] if lines else f'exit code {code}'}; see {log}")
    return run.job_id_path.read_text(encoding="utf-8")


def submit_to_cluster(run: RunDirectory, config: RunConfig) -> str:
    """Submits in this process; returns the job id."""
    import submitit

    executor: Any = submitit.LocalExecutor(run.jobs_path)
    minutes = config.cluster.timeout_min
    executor.update_parameters(timeout_min=minutes, stderr_to_stdout=True)
    devices = os.environ.get(_VISIBLE_DEVICES)
    return str(executor.submit(coordinate_locally, str(run.path), devices).job_id)


def coordinate(run_directory: str) -> int:
    """What the job runs."""
    from liver_hpc.coordinator import run_coordinator

    # Shortly before the job's time is up it gets SIGUSR2, for which submitit would requeue it or
    # raise: to the coordinator it is a request to stop, as SIGTERM is.
    signal.signal(signal.SIGUSR2, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    return run_coordinator(run_directory)


def coordinate_locally(run_directory: str, visible_devices: str | None) -> int:
    """What a local job runs: submitit hides all accelerators from it, so they are shown again."""
    if visible_devices is None:
        os.environ.pop(_VISIBLE_DEVICES, None)
    else:
        os.environ[_VISIBLE_DEVICES] = visible_devices
    return coordinate(run_directory)


def resolve_cluster(kind: str) -> str:
    """ "local" or "slurm" for "auto"; raises ConfigError where Slurm would have to be used.

    This version launches workers on one machine only; a login node must not train by accident.
    """
    has_slurm = shutil.which("sbatch") is not None
    if kind == "slurm" and not has_slurm:
        raise ConfigError("cluster slurm: there is no sbatch on the path")
    if kind == "slurm" or (kind == "auto" and has_slurm):
        raise ConfigError(
            f"cluster {kind}: this version starts workers on one machine only; inside an "
            "allocation of one node give --cluster local"
        )
    return "local"


def main(arguments: list[str]) -> int:
    run = RunDirectory(Path(arguments[0]))
    job_id = submit_to_cluster(run, run.config())
    run.job_id_path.write_text(job_id, encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Under its real name, so that submitit pickles `coordinate` by reference.
    from liver_hpc.launch import main as launch_main

    sys.exit(launch_main(sys.argv[1:]))
