"""Pure: the batch script of a burst allocation, and the words with which it is submitted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.config.schema import BurstSection, SbatchOptions, SlurmSection

SCRIPT_FILE = "burst.sbatch"


def burst_script(slurm: SlurmSection) -> str:
    """Holds the allocation for as long as the run lives; its argument is the run directory."""
    python = slurm.python or sys.executable
    lines = [
        "#!/bin/bash",
        "# Keeps preemptible nodes for a run; ends, and with it the allocation, with the run.",
        *slurm.setup,
        f'exec {shlex.quote(python)} -m liver_hpc.keeper --run-directory "$1"',
    ]
    return "\n".join(lines) + "\n"


def burst_arguments(
    slurm: SlurmSection, burst: BurstSection, request: Request, name: str, run_directory: Path
) -> list[str]:
    """sbatch's options. The job survives the loss of one of its nodes and is never requeued."""
    words = [f"--job-name={name}", f"--partition={burst.partition}", f"--nodes={request.nodes}"]
    words += ["--ntasks-per-node=1", f"--time={request.time_min}", "--no-requeue", "--no-kill"]
    words += [f"--output={run_directory}/logs/burst-%j.log", "--open-mode=append"]
    if slurm.account is not None:
        words.append(f"--account={slurm.account}")
    if slurm.qos is not None and "qos" not in burst.options:
        words.append(f"--qos={slurm.qos}")
    if burst.gpus_per_node:
        words.append(f"--gpus-per-node={burst.gpus_per_node}")
    if burst.cpus_per_node is not None:
        words.append(f"--cpus-per-task={burst.cpus_per_node}")
    return [*words, *option_words(burst.options)]


def option_words(options: SbatchOptions) -> list[str]:
    """{"constraint": "ib", "exclusive": True} as --constraint=ib --exclusive."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]
