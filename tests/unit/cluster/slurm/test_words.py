"""Every command line of Slurm, whole."""

from __future__ import annotations

import shlex
from pathlib import Path

from liver_hpc.cluster.slurm import words
from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.config.schema import BurstSection, SlurmSection
from tests.golden_files import Golden

RUN = Path("/runs/a b%")
SCRIPT = RUN / "burst.sbatch"
PART = BurstSection(
    partition="preempt",
    max_nodes=4,
    gpus_per_node=8,
    cpus_per_node=32,
    options={"constraint": "ib&gold", "exclusive": True, "qos": "cheap"},
)
PLAIN = BurstSection(partition="preempt", max_nodes=4)
PAID = SlurmSection(account="physics", qos="normal")
LINES = {
    "a run": words.sbatch([], RUN / "batch.sh"),
    "a burst request": words.sbatch(
        words.burst(PAID, PART, Request(2, 60), "run-burst-1", RUN), SCRIPT, [str(RUN)]
    ),
    "a plain burst request": words.sbatch(
        words.burst(SlurmSection(), PLAIN, Request(1, 5), "run-burst-2", RUN), SCRIPT, [str(RUN)]
    ),
    "an agent's step": words.srun("12", "liver-a0", ["n1"]),
    "a component's step, with accelerators": words.srun(
        "12", "liver-a1", ["n2"], het_group=1, gpus_per_node=4
    ),
    "a step on several nodes": words.srun("12", "doctor-look", ["n1", "n2"]),
    "the end of a job": words.cancel("12"),
    "a step's signal": words.cancel("12.3", "KILL"),
    "the end of all jobs of a name": words.cancel_named("run-burst-1", 1000),
    "a requeue": words.requeue("12"),
    "some jobs": words.jobs(["12", "15"]),
    "jobs of a name": words.jobs_named("run-burst-1", 1000),
    "a job's steps": words.steps("12"),
    "states of nodes": words.node_states(["n1", "n2"]),
    "names of nodes": words.hostnames("n[1-3]"),
    "partitions": words.partitions(),
    "the configuration": words.configuration(),
}


def test_every_command_line(golden: Golden) -> None:
    lines = [f"# {what}\n{shlex.join(line)}\n" for what, line in LINES.items()]
    golden.check("slurm/command-lines.sh", "\n".join(lines))


def test_what_the_run_file_says_of_burst_nodes_wins() -> None:
    line = words.burst(PAID, PART, Request(2, 60), "run-burst-1", RUN)
    assert [word for word in line if word.startswith("--qos")] == ["--qos=cheap"]
