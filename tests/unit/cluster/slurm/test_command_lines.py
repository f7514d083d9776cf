"""Every command line of Slurm, whole."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from liver_hpc.cluster.slurm import launcher
from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.cluster.slurm.commands import SlurmCommands, sbatch_words
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.launcher import srun_words
from liver_hpc.cluster.slurm.script import burst_options
from liver_hpc.cluster.slurm.together import STEP_VARIABLE
from liver_hpc.config.schema import BurstSection, SlurmSection
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from tests.golden_files import Golden
from tests.slurm_answers import Answer
from tests.unit.config.runs import minimal

RUN = Path("/runs/a b%")
SCRIPT = RUN / "burst.sbatch"
PART = BurstSection(
    partition="preempt",
    max_nodes=4,
    gpus_per_node="h100:8",
    cpus_per_node=32,
    options={"constraint": "ib&gold", "exclusive": True, "qos": "cheap"},
)
PLAIN = BurstSection(partition="preempt", max_nodes=4)
PAID = SlurmSection(account="physics", qos="normal")
LINES = {
    "a run": sbatch_words([], RUN / "batch.sh"),
    "a burst request": sbatch_words(
        burst_options(PAID, PART, Request(2, 60), "run-burst-1", RUN), SCRIPT, [str(RUN)]
    ),
    "a plain burst request": sbatch_words(
        burst_options(SlurmSection(), PLAIN, Request(1, 5), "run-burst-2", RUN), SCRIPT, [str(RUN)]
    ),
    "a step of one agent": srun_words(Allocation("main", "12", ("n1",), 1), "liver-a0", ["n1"]),
    "a component's step, with accelerators": srun_words(
        Allocation("extra", "13", ("n2", "n3"), 1, ("12", 1), gpus_per_node="h100:4"),
        "liver-a1",
        ["n2", "n3"],
    ),
    "a step beside that, which uses none": srun_words(
        Allocation("extra", "13", ("n2", "n3"), 1, ("12", 1), gpus_per_node="h100:4"),
        "liver-a1-kill",
        ["n2"],
        accelerated=False,
    ),
}
CALLS = {
    "the end of a job": lambda slurm: slurm.cancel("12"),
    "a step's signal": lambda slurm: slurm.cancel("12.3", "KILL"),
    "the end of all jobs of a name": lambda slurm: slurm.cancel_named("run-burst-1"),
    "a requeue": lambda slurm: slurm.requeue("12"),
    "the end of all requeues": lambda slurm: slurm.keep_ended(["12", "13"]),
    "some jobs": lambda slurm: slurm.jobs(["12", "15"]),
    "jobs of a name": lambda slurm: slurm.named("run-burst-1"),
    "a job's steps": lambda slurm: slurm.steps(["12", "13"]),
    "states of nodes": lambda slurm: slurm.node_states(["n1", "n2"]),
    "names of nodes": lambda slurm: slurm.hostnames("n[1-3]"),
    "partitions": lambda slurm: slurm.partitions(),
    "the configuration": lambda slurm: slurm.setting("KillWait"),
}


def test_every_command_line(golden: Golden) -> None:
    asked: list[Sequence[str]] = []

    def run(words: Sequence[str], limit_s: float) -> Answer:
        asked.append(words)
        return Answer(0, "KillWait = 30 sec" if words[-1] == "config" else "")

    every = {what: [line] for what, line in LINES.items()}
    for what, call in CALLS.items():
        asked.clear()
        call(SlurmCommands(1.0, 0.0, run=run))
        every[what] = [*asked]
    lines = [
        "\n".join([f"# {what}", *map(shlex.join, asked_then), ""])
        for what, asked_then in every.items()
    ]
    golden.check(
        "slurm/command-lines.sh", "\n".join(lines).replace(f"--user={os.geteuid()}", "--user=1000")
    )


def test_who_kills_agents_and_looks_for_them_takes_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(return_value=Mock(agents={"a1": Mock()}))
    monkeypatch.setattr(launcher, "Step", made)
    held = Allocation("main", "12", ("n1", "n2"), 1, gpus_per_node=4)
    run = launcher.slurm_launcher(tmp_path, minimal(), Mock(), lambda _: held)
    run.launch(LaunchAgent("a1", Seat("n1", (0,)), Layout(1, 1, 1)))
    (plan,) = made.call_args.args[:1]
    assert "--gpus-per-node=4" in plan.command.words
    assert plan.command.environment["SLURM_OOM_KILL_STEP"] == "0", "for each agent alone"
    for words in (plan.killing(["n1"]), plan.looking(["n1"])):
        assert "--gres=none" in words
        assert "--gpus-per-node=4" not in words


def test_of_two_runs_on_a_node_who_kills_an_agent_means_that_of_one(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an a0, and both are of one user."""
    made = Mock(return_value=Mock(agents={"a0": Mock()}))
    monkeypatch.setattr(launcher, "Step", made)
    plans = []
    for job in ("12", "13"):
        held = Allocation("main", job, ("n1", "n2"), 1)
        run = launcher.slurm_launcher(tmp_path, minimal(), Mock(), lambda _, held=held: held)
        run.launch(LaunchAgent("a0", Seat("n1", (0,)), Layout(1, 1, 1)))
        plans.append(made.call_args.args[0])
    told = {**os.environ, "PYTHONPATH": str(repository), "SLURMD_NODENAME": "n1"}
    killing, looking = plans[0].killing(["n1"]), plans[0].looking(["n1"])
    kill, look = (words[words.index(sys.executable) :] for words in (killing, looking))
    first, second = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, STEP_VARIABLE: mark})
        for mark in (plan.command.environment[STEP_VARIABLE] for plan in plans)
    )
    try:
        subprocess.run(kill, env=told, check=True)
        assert (first.wait(10.0), second.poll()) == (-signal.SIGKILL, None)
        assert subprocess.check_output(look, env=told, text=True) == "n1\n"
    finally:
        second.kill()
        second.wait()


def test_what_the_run_file_says_of_burst_nodes_wins() -> None:
    line = burst_options(PAID, PART, Request(2, 60), "run-burst-1", RUN)
    assert [word for word in line if word.startswith("--qos")] == ["--qos=cheap"]
