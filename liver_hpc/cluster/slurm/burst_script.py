"""Pure: the batch script of a burst allocation, and the words with which it is submitted."""

from __future__ import annotations

import shlex
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.cluster.slurm.script import Option, python_words, resources
from liver_hpc.config.schema import BurstSection, ClusterSection, SlurmSection

SCRIPT_FILE = "burst.sbatch"


def burst_script(cluster: ClusterSection) -> str:
    """Holds the allocation for as long as the run lives; its argument is the run directory."""
    keeper = shlex.join([*python_words(cluster), "-m", "liver_hpc.node.keeper"])
    lines = [
        "#!/bin/bash",
        "# Keeps preemptible nodes for a run, and gives them back when the run is over.",
        *cluster.slurm.setup,
        f'exec {keeper} --run-directory "$1"',
    ]
    return "\n".join(lines) + "\n"


def burst_arguments(
    slurm: SlurmSection, burst: BurstSection, request: Request, name: str, run_directory: Path
) -> list[str]:
    """sbatch's options. The job survives the loss of one of its nodes and is never requeued."""
    logs = str(run_directory / "logs").replace("%", "%%")
    options: list[Option] = [
        ("job-name", name),
        ("partition", burst.partition),
        ("nodes", request.nodes),
        ("time", request.time_min),
        ("no-requeue", True),
        ("no-kill", True),
        ("output", f"{logs}/burst-%j.log"),
        ("open-mode", "append"),
        ("export", "ALL"),
    ]
    if slurm.account is not None:
        options.append(("account", slurm.account))
    if slurm.qos is not None:
        options.append(("qos", slurm.qos))
    # What the section itself says comes last and wins.
    options += resources(burst)
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in dict(options).items()
    ]
