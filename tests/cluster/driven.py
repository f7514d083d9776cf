"""A run's Slurm side in a process on the control host, led by a test."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import yaml

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.run.secret import create_secret
from slurm.testbed.hosts import environment, in_control
from tests.cluster.harness import REPOSITORY, SlurmCluster

Event = dict[str, Any]

CONFIG: dict[str, Any] = {
    "data": {"text": "python-stdlib"},
    "train": {"steps": 10, "global_batch": 8},
    "workers": {"initial": 1, "max": 3},
    "layouts": {1: {"dp": 1}, 2: {"dp": 2}},
    "deadlines": {"coordinator_s": 3.0},
}

# Enters a job: notes the environment that the coordinator would have, and holds the nodes.
HOLD = """
{python} -c 'import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], "w"))' {job}.new
mv {job}.new {job}
exec sleep 600
"""


def wait_for(condition: Callable[[], bool], limit_s: float, waits_for: str) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, waits_for), interval_s=0.05)


def commands_of(cluster: SlurmCluster) -> SlurmCommands:
    """Slurm's commands on the control host, from the test's process."""

    def run(words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            in_control(cluster.place, words),
            env={**environment(cluster.place), "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    return SlurmCommands(20.0, 40.0, run=run)


class DrivenRun:
    """A run directory in the shared directory, its job, and the process that stands for it."""

    def __init__(self, cluster: SlurmCluster, name: str, slurm: dict[str, Any]) -> None:
        self.cluster = cluster
        self.commands = commands_of(cluster)
        self.path = cluster.fresh(name)
        (self.path / "logs").mkdir()
        section = {
            "poll_s": 0.5,
            "end_window_s": 5.0,
            "command_s": 20.0,
            "unreachable_s": 60.0,
            **slurm,
        }
        cluster_section = {"kind": "slurm", "workers_per_node": 1, "slurm": section}
        config = {**CONFIG, "cluster": cluster_section}
        (self.path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        create_secret(self.path / "secret")
        self.events: list[Event] = []
        self.granted: set[str] = set()  # nodes, at any time
        self._answers: queue.Queue[Event] = queue.Queue()
        self.process: subprocess.Popen[str] | None = None

    # ---- the own job

    def submit(self, *components: Sequence[str]) -> str:
        """A job with these sbatch options, one sequence a component; its id once it runs."""
        blocks = "\n#SBATCH hetjob\n".join(
            "\n".join(f"#SBATCH {option}" for option in options) for options in components
        )
        job_file = self.path / "job.json"
        body = HOLD.format(python=sys.executable, job=job_file)
        script = self.path / "job.sh"
        script.write_text(f"#!/bin/sh\n{blocks}\n{body}", encoding="utf-8")
        job = self.commands.sbatch([f"--output={self.path}/logs/job.log"], script)
        wait_for(job_file.exists, 20.0, f"job {job} to run")
        return job

    # ---- the process

    def start(self, adopt: bool = False) -> None:
        """adopt: what one that was killed has left."""
        self.process = subprocess.Popen(
            in_control(
                self.cluster.place,
                [sys.executable, "-m", "tests.cluster.slurm_driver", str(self.path)],
            ),
            cwd=REPOSITORY,
            env=environment(self.cluster.place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.path / "logs" / "driver.log").open("ab"),
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.ask("start", dict.fromkeys(sorted(self.granted)) if adopt else None)

    def _listen(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["kind"] == "Answer":
                self._answers.put(event)
            else:
                self.events.append(event)
                if event["kind"] == "NodeGranted":
                    self.granted.add(event["node"]["name"])

    def ask(self, operation: str, *arguments: object, limit_s: float = 60.0) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self.process.stdin.flush()
        try:
            return self._answers.get(timeout=limit_s)["value"]
        except queue.Empty:
            log = (self.path / "logs" / "driver.log").read_text(encoding="utf-8")
            raise AssertionError(f"no answer to {operation} in {limit_s:g} s\n{log}") from None

    def kill(self) -> None:
        """SIGKILL, as for a coordinator that the kernel ran out of memory for."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10.0)

    # ---- what was told

    def told(self, kind: str, **fields: object) -> list[Event]:
        """Events of a kind with these fields; node=... also means the node of a granted one."""
        return [
            event
            for event in list(self.events)
            if event["kind"] == kind and all(_field(event, k) == v for k, v in fields.items())
        ]

    def wait_told(self, kind: str, limit_s: float = 15.0, **fields: object) -> Event:
        """The first such event."""

        def came() -> bool:
            return bool(self.told(kind, **fields))

        try:
            wait_for(came, limit_s, f"{kind} {fields}")
        except Exception as error:
            log = (self.path / "logs" / "driver.log").read_text(encoding="utf-8")
            raise AssertionError(f"{error}; told: {self.events}\n{log}") from error
        return self.told(kind, **fields)[0]

    def burst_jobs(self) -> list[str]:
        """All jobs of this run's bursts that Slurm still knows, by id."""
        record = json.loads((self.path / "burst.json").read_text(encoding="utf-8"))
        return list(self.commands.named(record["job_name"]))


def _field(event: Event, name: str) -> object:
    node = event.get("node")
    if isinstance(node, dict):  # a granted one
        return node["name"] if name == "node" else node.get(name, event.get(name))
    return event.get(name)


@contextmanager
def driven(cluster: SlurmCluster, name: str, slurm: dict[str, Any]) -> Iterator[DrivenRun]:
    run = DrivenRun(cluster, name, slurm)
    try:
        yield run
    finally:
        if run.process is not None and run.process.poll() is None:
            run.kill()


def processes_with(*words: str) -> list[psutil.Process]:
    """Processes with all these words on their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if set(words) <= set(process.info["cmdline"] or ())
    ]


# ---- the controller


def stop_controller(cluster: SlurmCluster) -> None:
    """slurmctld ends in good order; nodes and steps go on."""
    cluster.run("scontrol", "shutdown", "slurmctld")
    pid_file = cluster.place.run / "slurmctld.pid"

    def ended() -> bool:
        return not pid_file.exists()

    wait_for(ended, 15.0, "slurmctld to end")


def start_controller(cluster: SlurmCluster) -> None:
    """slurmctld again, with the state that it saved."""
    cluster.testbed("start-controller")
