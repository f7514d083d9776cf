"""A task that runs in the place of an agent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.launcher import slurm_launcher, srun_words
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat
from tests.slurm_answers import Answer
from tests.unit.config.runs import minimal

HELD = Allocation("main", "12", ("n1",), 1)


def no_steps(words: Sequence[str], limit_s: float) -> Answer:
    """A Slurm that knows of no step any more."""
    return Answer(0, "")


def test_it_is_a_step_of_the_nodes_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    lines = [
        "#!/bin/sh",
        f"printf '%s\\n' \"$@\" > {tmp_path}/words",
        f"printf '%s' \"$SRUN_EXPORT_ENV\" > {tmp_path}/exported",
        f"printf '%s' \"$SLURM_JOB_ID\" > {tmp_path}/job",
        "exit 7",
    ]
    (programs / "srun").write_text("\n".join(lines))
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    slurm = {"python": "/opt/image run python3", "step_options": {"export": "ALL,KEY=hunter2"}}
    cluster = {"kind": "slurm", "slurm": slurm}
    task = ["liver_hpc.worker.derive", "run.yaml", "derived.json"]
    squeue = Squeue(SlurmCommands(5.0, 0.0, run=no_steps), 5.0)
    launcher = slurm_launcher(tmp_path, minimal(cluster=cluster), squeue, lambda _: HELD, task=task)
    launcher.launch(LaunchAgent("derivation", Seat("n1", (0,)), Layout(1, 1, 1)))
    deadline = Deadline.after(SystemClock(), 20.0, "the task")
    poll_until(lambda: not launcher.alive("derivation"), deadline)
    launcher.close()
    words = (tmp_path / "words").read_text().splitlines()
    assert (tmp_path / "exported").read_text() == "ALL,KEY=hunter2"
    env, job, _, *step = srun_words(HELD, "liver-derivation", ["n1"])
    assert (env, (tmp_path / "job").read_text()) == ("env", job.removeprefix("SLURM_JOB_ID="))
    assert words == [*step, "/opt/image", "run", "python3", "-P", "-m", *task]
    assert launcher.exit_code("derivation") == 7
