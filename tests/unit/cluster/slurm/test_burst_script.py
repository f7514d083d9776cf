"""The words and the script of a burst request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.cluster.slurm.burst_script import burst_arguments, burst_script
from liver_hpc.config.schema import BurstSection, ClusterSection, SlurmSection

RUN = Path("/runs/a b%")


def test_the_options_of_a_request() -> None:
    slurm = SlurmSection(account="physics", qos="normal")
    options = {"constraint": "ib&gold", "exclusive": True, "qos": "cheap"}
    burst = BurstSection(
        partition="preempt", max_nodes=4, gpus_per_node=8, cpus_per_node=32, options=options
    )
    words = burst_arguments(slurm, burst, Request(2, 60), "run-burst-1", RUN)
    assert words == [
        "--job-name=run-burst-1",
        "--partition=preempt",
        "--nodes=2",
        "--time=60",
        "--no-requeue",
        "--no-kill",
        "--output=/runs/a b%%/logs/burst-%j.log",
        "--open-mode=append",
        "--export=ALL",
        "--account=physics",
        "--qos=cheap",
        "--ntasks-per-node=1",
        "--cpus-per-task=32",
        "--gpus-per-node=8",
        "--constraint=ib&gold",
        "--exclusive",
    ]


def test_the_script_sets_up_and_becomes_the_keeper(tmp_path: Path) -> None:
    fake = tmp_path / "a python"
    fake.write_text('#!/bin/sh\necho "$SET $$ $*"\n', encoding="utf-8")
    fake.chmod(0o700)
    slurm = SlurmSection(setup=["export SET=up"], python=f"'{fake}' -X dev")
    script = tmp_path / "burst.sbatch"
    script.write_text(burst_script(ClusterSection(slurm=slurm)), encoding="utf-8")
    process = subprocess.Popen(
        ["/bin/bash", str(script), str(RUN)], stdout=subprocess.PIPE, text=True
    )
    printed, _ = process.communicate(timeout=10.0)
    # the shell itself becomes the keeper: Slurm ends the job with it
    assert printed == f"up {process.pid} -X dev -P -m liver_hpc.node.keeper --run-directory {RUN}\n"
    assert sys.executable in burst_script(ClusterSection())
