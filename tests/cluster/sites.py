"""Runs on a real Slurm whose coordinator is a stand-in that trains nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.run.directory import RunDirectory
from tests.cluster.harness import REPOSITORY, SlurmCluster, command_line
from tests.unit.config.runs import MINIMAL
from tests.unit.standin import sitecustomize_in

COMPONENTS = [
    {"name": "main", "partition": "stable", "gpus_per_node": 2},
    {"name": "extra", "partition": "stable", "gpus_per_node": 2},
]
# A requeued job waits for its old credential to expire: 10 s here.
AGAIN_S = 60.0


def await_that(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, what), interval_s=0.2)


class Site:
    """A directory that all nodes see, with a run file, and `liver` on the control host."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        sitecustomize_in(directory, REPOSITORY)
        self.environment = [f"PYTHONPATH={directory}:{REPOSITORY}", f"VIRTUAL_ENV={sys.prefix}"]
        self.write_run()

    def write_run(self, **slurm: Any) -> None:
        """The run file, with keys of its section `cluster.slurm`."""
        section = {"components": COMPONENTS, "end_window_s": 20.0, "poll_s": 1.0, **slurm}
        cluster_section = {"workers_per_node": 2, "timeout_min": 5, "slurm": section}
        values = {**MINIMAL, "cluster": cluster_section}
        (self.directory / "run.yaml").write_text(yaml.safe_dump(values))

    def coordinator_begins_with(self, statement: str) -> None:
        """What the stand-in does first, from now on."""
        sitecustomize_in(self.directory, REPOSITORY, statement)

    def words(self, *words: str) -> list[str]:
        return ["env", f"--chdir={self.directory}", *self.environment, *words]

    def run(self, *words: str) -> str:
        return self.cluster.run(*self.words(*words), limit_s=60.0)

    def liver(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "liver_hpc", *arguments)

    def submit(self, *environment: str) -> Path:
        """The run directory of a run that was submitted from such an environment."""
        words = [sys.executable, "-m", "liver_hpc.submit", "--config", "run.yaml"]
        shown = self.run("env", *environment, *words)
        return self.directory / shown.strip()

    def liver_fails(self, *arguments: str) -> str:
        """What a command prints that fails."""
        return self._fails(*arguments).stdout

    def refused(self, *arguments: str, code: int | None = None) -> str:
        """What a command complains of that fails, with this exit code if one is given."""
        done = self._fails(*arguments)
        assert done.returncode == code or code is None, done.stderr
        return done.stderr

    def _fails(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = self.words(sys.executable, "-m", "liver_hpc", *arguments)
        done = self.cluster.attempt(command_line(self.cluster.name, "exec", "--", *line), 60.0)
        assert done.returncode != 0, done.stdout
        return done

    def end(self) -> str:
        """What the run that is `latest` ended with, after it was stopped."""
        return self.liver("stop", "latest", "--timeout-s", "30").strip()

    def jobs(self) -> str:
        return self.cluster.run("squeue", "--noheader", "--format=%i %P %T %r").strip()

    def job_state(self, job: str) -> str:
        """Also of a job that has ended a while ago."""
        shown = self.cluster.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]


def await_coordinator(run: Path) -> dict[str, Any]:
    await_that((run / "coordinator.json").exists, f"the coordinator of {run}", AGAIN_S)
    address: dict[str, Any] = json.loads((run / "coordinator.json").read_text())
    return address


def job_of(run: Path) -> str:
    """The id of its job."""
    return RunDirectory(run).job_id() or ""
