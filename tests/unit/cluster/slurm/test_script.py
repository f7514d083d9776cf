"""Batch scripts, whole, and what sbatch must not find in the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cluster.slurm.script import (
    batch_script,
    burst_script,
    job_options,
    python_words,
    sbatch_environment,
)
from liver_hpc.config.schema import ClusterSection, SlurmSection
from liver_hpc.run.directory import RunDirectory
from tests.golden_files import Golden

MAIN: dict[str, Any] = {"name": "main"}
RUN = Path("/shared/runs/big-20260102-030405")


def cluster(*components: dict[str, Any], **slurm: Any) -> ClusterSection:
    section = {"components": list(components), "python": "python3", **slurm}
    return ClusterSection.model_validate({"timeout_min": 240, "slurm": section})


def text(*components: dict[str, Any], run: Path = RUN, **slurm: Any) -> str:
    return batch_script(cluster(*components, **slurm), RunDirectory(run))


FILES = {
    "one-component.sh": text({"name": "main", "nodes": 2}),
    "components.sh": text(
        {"name": "main", "partition": "stable", "nodes": 2, "gpus_per_node": 4, "cpus_per_node": 32,
         "options": {"exclusive": True, "mem": 0, "constraint": "ib&a100"}},
        {"name": "extra", "partition": "stable",
         "options": {"qos": "low", "reservation": "my own"}},
        account="lab", qos="high", requeue=False, end_window_s=90.5,
        setup=["module load cuda/12.4", "export NCCL_DEBUG=INFO"],
        python="apptainer exec --nv '/images/my image.sif' python3",
    ),
    "odd-path.sh": text(MAIN, run=Path("/shared/it's 100% \"mine\" $HOME # no/run-1")),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_batch_script(name: str, golden: Golden) -> None:
    golden.check(f"batch/{name}", FILES[name])


def test_how_the_job_is_queued_again() -> None:
    assert "#SBATCH --requeue\n" in text(MAIN)
    assert "#SBATCH --no-requeue\n" in text(MAIN, requeue=False)
    assert "#SBATCH --requeue=expedite\n" in text(MAIN, requeue="expedite")


def test_gpus_of_a_type() -> None:
    script = text({"name": "main", "gpus_per_node": "h100:4"})
    assert "#SBATCH --gpus-per-node=h100:4\n" in script


def test_a_line_end_is_never_written() -> None:
    with pytest.raises(ValueError, match=r"'a\\nb' is empty or has control"):
        text({"name": "main", "options": {"constraint": "a\nb"}})


def test_setup_cannot_become_an_option() -> None:
    """sbatch reads options up to the first command."""
    lines = text(MAIN, setup=["#SBATCH --nodes=9"]).splitlines()
    commands = [index for index, line in enumerate(lines) if line and not line.startswith("#")]
    assert commands[0] < lines.index("#SBATCH --nodes=9")


def test_the_python_of_this_process_runs_the_nodes_too() -> None:
    assert python_words(ClusterSection()) == [sys.executable, "-P"]


@pytest.mark.parametrize(
    ("variable", "stays"),
    [
        ("PATH", True),
        ("SLURM_CONF", True),
        ("SLURM_JOB_ID", False),
        ("PMI_RANK", False),
        ("SBATCH_ACCOUNT", True),  # the run file names none
        ("SBATCH_RESERVATION", True),
        ("SBATCH_PARTITION", False),
        ("SBATCH_TIMELIMIT", False),
        ("SBATCH_REQUEUE", False),
        ("SBATCH_NO_REQUEUE", False),
        ("SBATCH_GPUS_PER_NODE", False),
        ("SBATCH_MEM_PER_NODE", False),
        ("SBATCH_MEM_PER_CPU", False),  # not beside the other
    ],
)
def test_what_sbatch_starts_from(variable: str, stays: bool) -> None:
    options = {"mem": 0}
    made = cluster({"name": "m", "partition": "stable", "gpus_per_node": 1, "options": options})
    environment = {variable: "x", "HOME": "/home/me"}
    left = sbatch_environment(environment, job_options(made, RunDirectory(RUN)))
    assert left == (environment if stays else {"HOME": "/home/me"})


def test_the_burst_script_sets_up_and_becomes_the_keeper(tmp_path: Path) -> None:
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
