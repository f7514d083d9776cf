"""`liver doctor` on a real Slurm: what it says of a cluster that works, and of broken ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from tests.cluster.harness import SlurmCluster, command_line

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

EXAMINED_S = 150.0
DOCTOR = (sys.executable, "-m", "liver_hpc", "doctor", "--json")

RUN_FILE = """\
train: {steps: 10, global_batch: 4}
data: {text: python-stdlib}
workers: {initial: 2, max: 2}
layouts: {2: {dp: 2}}
deadlines: {exit_s: 4}
cluster:
  kind: slurm
  slurm:
    components: [{name: main, partition: stable}]
    burst: {partition: preempt, max_nodes: 2}
"""


@dataclass(frozen=True)
class Report:
    """Findings by check, and the exit code."""

    code: int
    levels: dict[str, str]
    found: dict[str, str]
    advice: dict[str, str]

    def at(self, level: str) -> list[str]:
        return [check for check, one in self.levels.items() if one == level]


def examined(cluster: SlurmCluster, *words: str, before: tuple[str, ...] = ()) -> Report:
    """Runs the doctor on the control host, after the words of `before`."""
    command = command_line(cluster.name, "exec", "--", *before, *DOCTOR, *words)
    done = cluster.attempt(command, EXAMINED_S)
    assert done.returncode in (0, 1), done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    return Report(
        done.returncode,
        {finding["check"]: finding["level"] for finding in findings},
        {finding["check"]: finding["found"] for finding in findings},
        {finding["check"]: finding["advice"] for finding in findings},
    )


def assert_nothing_left(cluster: SlurmCluster, runs: Path) -> None:
    """No job of its own, and nothing of it in the runs directory."""

    def gone() -> bool:
        return not cluster.run("squeue", "--noheader")

    poll_until(gone, Deadline.after(SystemClock(), 15.0, "the doctor's job to end"), 0.2)
    assert not runs.exists()


@pytest.fixture
def runs(slurm_cluster: SlurmCluster) -> Path:
    """A runs directory that all nodes see, not made yet."""
    return slurm_cluster.shared / "doctors-runs"


@pytest.fixture
def run_file(slurm_cluster: SlurmCluster) -> str:
    path = slurm_cluster.shared / "doctor.yaml"
    path.write_text(RUN_FILE, encoding="utf-8")
    return str(path)


def test_a_cluster_that_works(slurm_cluster: SlurmCluster, runs: Path, run_file: str) -> None:
    report = examined(
        slurm_cluster,
        *("--config", run_file, "--nodes", "2", "--partition", "preempt"),
        *("--runs-directory", str(runs)),
    )
    assert report.code == 0, report.found
    assert report.at("FAIL") == []
    assert report.at("WARN") == ["signals"]  # the test cluster has proctrack/linuxproc
    assert report.at("SKIP") == ["nccl"]  # the GPUs of the test cluster are not real
    assert "preempt (preempt mode REQUEUE, grace 4 s)" in report.found["partitions"]
    assert "by gloo tcp (eth0/10.77.0.1" in report.found["gloo"]
    assert "10.77.0.1" in report.found["mpi meeting"]
    assert_nothing_left(slurm_cluster, runs)


def test_inside_an_allocation_its_nodes_are_examined_and_kept(
    slurm_cluster: SlurmCluster, runs: Path
) -> None:
    inside = ("salloc", "--nodes=2", "--partition=stable")
    report = examined(slurm_cluster, "--runs-directory", str(runs), before=inside)
    assert report.code == 0, report.found
    assert "around this process" in report.found["nodes"]
    assert report.at("WARN") == []
    assert_nothing_left(slurm_cluster, runs)


def test_without_nodes_only_this_host_is_looked_at(slurm_cluster: SlurmCluster, runs: Path) -> None:
    report = examined(slurm_cluster, "--runs-directory", str(runs))
    assert report.code == 0
    assert report.levels["nodes"] == "SKIP"
    assert "--nodes 2" in report.found["nodes"]
    assert not runs.exists()


def test_a_runs_directory_of_one_host_alone(slurm_cluster: SlurmCluster) -> None:
    own = Path(f"/tmp/doctors-runs-{os.getpid()}")  # every node has a /tmp of its own
    report = examined(slurm_cluster, "--nodes", "2", "--runs-directory", str(own))
    assert report.code == 1
    assert report.at("FAIL") == ["shared directory"]
    assert f"n1, n2: {own} as the asking host has it is" in report.found["shared directory"]
    assert "mpi meeting" in report.at("SKIP")
    assert report.levels["gloo"] == "PASS"
    assert_nothing_left(slurm_cluster, own)


def test_a_python_that_is_not_on_the_nodes(
    slurm_cluster: SlurmCluster, runs: Path, run_file: str
) -> None:
    missing = "cluster.slurm.python=/nowhere/python"
    report = examined(
        slurm_cluster,
        *("--config", run_file, "--set", missing, "--nodes", "2", "--runs-directory", str(runs)),
    )
    assert report.at("FAIL") == ["allocation"]
    assert "/nowhere/python" in report.found["allocation"]
    assert_nothing_left(slurm_cluster, runs)


@pytest.mark.long
def test_nodes_that_are_not_granted(slurm_cluster: SlurmCluster, runs: Path) -> None:
    slurm_cluster.run("salloc", "--no-shell", "--nodes=3", "--partition=stable")
    report = examined(
        slurm_cluster,
        *("--nodes", "2", "--partition", "stable", "--grant-s", "2", "--runs-directory", str(runs)),
    )
    assert report.at("FAIL") == ["allocation"]
    assert "waited 2 s for 2 nodes of partition stable" in report.found["allocation"]
    assert "pending" in report.found["allocation"]
    slurm_cluster.run("scancel", "--user=root", "--state=RUNNING")
    assert_nothing_left(slurm_cluster, runs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_examination_gives_its_nodes_back(
    slurm_cluster: SlurmCluster, runs: Path, number: signal.Signals
) -> None:
    words = (*DOCTOR, "--nodes", "2", "--runs-directory", str(runs))
    doctor = slurm_cluster.start(*words)
    deadline = Deadline.after(SystemClock(), 30.0, "the doctor's nodes")
    poll_until(lambda: bool(list(runs.glob(".doctor-*/n?"))), deadline, 0.05)
    doctor.send_signal(number)
    printed, _ = doctor.communicate(timeout=40.0)
    if number is signal.SIGKILL:
        assert doctor.returncode == -signal.SIGKILL
        shutil.rmtree(runs)  # nobody is there to clear it up
    else:
        assert doctor.returncode == 130
        assert "nothing of the examination is left" in printed
    assert_nothing_left(slurm_cluster, runs)


@pytest.fixture
def unhealthy_cluster(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmCluster]:
    """A cluster of one node beside the session's, to be broken."""
    cluster = SlurmCluster(f"{slurm_cluster.name}-unhealthy", tmp_path)
    cluster.up(nodes=1)
    yield cluster
    cluster.testbed("down")


@pytest.mark.long
def test_a_broken_munge(unhealthy_cluster: SlurmCluster, tmp_path: Path) -> None:
    cluster, runs = unhealthy_cluster, tmp_path / "runs"
    words = ("--nodes", "1", "--runs-directory", str(runs))

    other = ("env", f"SLURM_CONF={other_key(cluster, tmp_path)}")
    report = examined(cluster, *words, before=other)
    end(tmp_path / "munged.pid")
    assert report.code == 1
    assert report.at("FAIL") == ["controller"]
    assert "the same key" in report.advice["controller"]
    assert report.levels["nodes"] == "SKIP"

    end(cluster.place.run / "munged.pid")
    report = examined(cluster, *words)
    assert report.code == 1
    assert report.at("FAIL") == ["controller"]
    assert "Munge encode failed" in report.found["controller"]
    assert {"partitions", "nodes"} <= set(report.at("SKIP"))
    assert not runs.exists()


def other_key(cluster: SlurmCluster, directory: Path) -> Path:
    """A slurm.conf whose munge has a key that the controller does not hold."""
    key, socket = directory / "key", directory / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munged = ["munged", "--force", f"--socket={socket}", f"--key-file={key}"]
    munged += [f"--{name}-file={directory / f'munged.{name}'}" for name in ("log", "pid", "seed")]
    path = os.environ["PATH"] + ":/usr/sbin"
    subprocess.run(munged, check=True, timeout=20.0, env={**os.environ, "PATH": path})
    configuration = (cluster.place.root / "etc" / "slurm.conf").read_text(encoding="utf-8")
    ours = configuration.replace(str(cluster.place.munge_socket), str(socket))
    assert ours != configuration
    changed = directory / "slurm.conf"
    changed.write_text(ours, encoding="utf-8")
    return changed


def end(pid_file: Path) -> None:
    """Ends the munged that wrote this file."""
    pid = int(pid_file.read_text(encoding="ascii"))
    os.kill(pid, signal.SIGTERM)
    deadline = Deadline.after(SystemClock(), 10.0, "munged to end")
    poll_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), deadline)
