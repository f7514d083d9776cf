"""An agent in a step of a preemptible job: Slurm's signals reach the coordinator, nothing dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from liver_hpc import __version__
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import (
    DeadlineSection,
    LayoutSection,
    RunConfig,
    TrainSection,
    WorkersSection,
)
from liver_hpc.host.marks import kill_marked, marked_processes
from slurm.testbed.membership import describe
from tests.cluster.harness import SlurmCluster

# An installation of Slurm falls into the first test.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

MARK = "LIVER_TEST_RUN"
CONTROL_ADDRESS = "10.77.0.1"

# Boots at once and has a child of its own; both note every 50 ms that they live.
WORKER = """
import json, os, struct, subprocess, sys, time
rank, directory = os.environ["LIVER_LOCAL_RANK"], sys.argv[1]
agent = int(os.environ["LIVER_AGENT_FD"])
os.write(agent, struct.pack("!IB", 6, 0) + b"booted")
told = json.loads(os.read(agent, struct.unpack("!IB", os.read(agent, 5))[0]))
loop = "while :; do touch $0; sleep 0.05; done"
subprocess.Popen(["/bin/sh", "-c", loop, f"{directory}/child-{rank}"])
while True:
    with open(f"{directory}/worker-{rank}", "w") as beat:
        beat.write(str(os.getpid()))
    time.sleep(0.05)
"""


def wait_for(condition: Callable[[], bool], limit_s: float, waits_for: str) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, waits_for), interval_s=0.05)


@dataclass
class Stage:
    """A rendezvous on the control host and an agent with two workers in a step of `job` on n1."""

    cluster: SlurmCluster
    directory: Path
    job: str
    step: subprocess.Popen[str]

    @property
    def beats(self) -> list[Path]:
        return [
            self.directory / f"{what}-{slot}" for what in ("worker", "child") for slot in (1, 3)
        ]

    def said(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "said.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["type"] == kind]

    def beat_at_s(self) -> float:
        """When the one that beat the longest time ago did so."""
        return min(path.stat().st_mtime for path in self.beats)

    def alive(self) -> list[str]:
        """Of the step's processes; none of the testbed's own or of the rendezvous's."""
        return [describe(pid) for pid in marked_processes(MARK, str(self.directory))]

    def log(self) -> str:
        path = self.directory / "logs" / "agent-a0.log"
        return path.read_text(encoding="utf-8") if path.exists() else "no log of the agent"


def prepare(directory: Path) -> None:
    (directory / "logs").mkdir(parents=True)
    config = RunConfig(
        train=TrainSection(steps=1, global_batch=8),
        workers=WorkersSection(initial=2, max=8),
        layouts={2: [LayoutSection(dp=2)]},
        deadlines=DeadlineSection(boot_s=20.0, meet_s=20.0, exit_s=2.0),
    )
    (directory / "run.yaml").write_text(dump_run(config), encoding="utf-8")


def start_agent(cluster: SlurmCluster, directory: Path, job: str) -> subprocess.Popen[str]:
    worker = [sys.executable, "-c", WORKER, str(directory)]
    words = ["--version", __version__, "--run-directory", str(directory), "--agent", "a0"]
    words += ["--layout", "dp2", "--slots", "1,3", "--warnings"]
    return cluster.start(
        *("env", f"{MARK}={directory}", "srun", f"--jobid={job}", "--overlap", "--mpi=none"),
        *("-N1", "-n1", "-w", "n1", sys.executable, "-m", "liver_hpc.node.agent", *words),
        *("--worker-command", json.dumps(worker)),
    )


@pytest.fixture
def stage(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Stage]:
    directory = slurm_cluster.fresh(request.node.name)
    prepare(directory)
    job = slurm_cluster.run(
        *("sbatch", "--parsable", "-p", "preempt", "-N1", "-w", "n1", "--no-requeue"),
        *(f"--output={directory}/logs/job.log", "--wrap=sleep 300"),
    ).strip()
    wait_for(
        lambda: slurm_cluster.run("squeue", "-h", "-j", job, "-o", "%t").strip() == "R",
        20.0,
        f"job {job} to run",
    )
    coordinator = slurm_cluster.start(
        *(
            sys.executable,
            "-m",
            "tests.cluster.warnings_rendezvous",
            str(directory),
            CONTROL_ADDRESS,
        )
    )
    try:
        wait_for(
            lambda: (directory / "open").exists() or coordinator.poll() is not None,
            30.0,
            "the rendezvous to open",
        )
        assert coordinator.poll() is None, coordinator.communicate()[0]
        step = start_agent(slurm_cluster, directory, job)
        made = Stage(slurm_cluster, directory, job, step)
        wait_for(
            lambda: step.poll() is not None or bool(made.said("agent_hello")),
            30.0,
            "the agent to meet",
        )
        assert step.poll() is None, f"{step.communicate()[0]}\n{made.log()}"
        wait_for(lambda: all(path.exists() for path in made.beats), 10.0, "workers to work")
        yield made
        (directory / "end").touch()
        (directory / "over").touch()
        output, _ = coordinator.communicate(timeout=20.0)
        assert coordinator.returncode == 0, output
    finally:
        kill_marked(MARK, str(directory), 5.0)
        coordinator.terminate()
        coordinator.communicate(timeout=10.0)


def test_preemption_warns_at_once_and_ends_nobody_before_the_coordinator_does(
    stage: Stage,
) -> None:
    (hello,) = stage.said("agent_hello")
    assert (hello["agent"], hello["host"]) == ("a0", "n1")
    assert len(stage.alive()) >= 6  # srun, the agent, its workers and their children

    asked_s = time.time()
    taker = stage.cluster.start("srun", "-p", "stable", "-w", "n1", "hostname")
    wait_for(lambda: bool(stage.said("warned")), 10.0, "the warning")
    warned = stage.said("warned")[0]
    assert (warned["agent"], warned["signal"]) == ("a0", "TERM")
    assert asked_s < warned["at_s"] < asked_s + 3.0  # the scheduler's share included
    assert warned["heard_s"] - warned["at_s"] < 1.0

    almost_s = warned["at_s"] + stage.cluster.grace_s - 1.0
    wait_for(lambda: stage.beat_at_s() > almost_s, 10.0, "all to live through the grace time")
    assert stage.step.poll() is None

    (stage.directory / "end").touch()
    output, _ = stage.step.communicate(timeout=5.0)
    assert stage.step.returncode == 0, output
    wait_for(lambda: bool(stage.said("gone")), 5.0, "the channel to end")
    assert stage.alive() == []
    assert stage.said("worker_ended") == []
    assert "n1" in taker.communicate(timeout=30.0)[0]


@pytest.mark.parametrize("target", ["step", "job"])
def test_signals_by_scancel_are_warnings(stage: Stage, target: str) -> None:
    where = f"{stage.job}.0" if target == "step" else stage.job
    for number, name in enumerate(("USR1", "USR2", "TERM"), 1):
        sent_s = time.time()
        stage.cluster.run("scancel", f"--signal={name}", where)
        wait_for(lambda count=number: len(stage.said("warned")) >= count, 10.0, name)
        assert stage.said("warned")[-1]["signal"] == name
        wait_for(lambda since_s=sent_s: stage.beat_at_s() > since_s + 0.5, 5.0, "all to live on")
    (stage.directory / "end").touch()
    assert stage.step.wait(5.0) == 0
    assert stage.alive() == []


def test_a_cancelled_job_that_nobody_ends_is_killed_whole(stage: Stage) -> None:
    stage.cluster.run("scancel", stage.job)
    wait_for(lambda: bool(stage.said("warned")), 10.0, "the warning")
    # KillWait of the cluster is 5 s.
    wait_for(lambda: not stage.alive(), 20.0, "Slurm to kill what did not leave")
    wait_for(lambda: bool(stage.said("gone")), 5.0, "the channel to end")
    stage.step.communicate(timeout=20.0)
