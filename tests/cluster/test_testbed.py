"""The test cluster itself: hosts of their own, preemption, loss and return, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from slurm.testbed.membership import Kept, describe, inhabitants, members, namespaces
from tests.cluster.harness import REPOSITORY, SlurmCluster, command_line

# An installation of Slurm falls into the first test.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


def wait_for(condition: Callable[[], bool], limit_s: float, waits_for: str) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, waits_for), interval_s=0.05)


def script(cluster: SlurmCluster, name: str, text: str) -> str:
    """A shell script that sees the shared directory as $SHARED and as its own."""
    path = cluster.shared / name
    path.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_every_node_is_a_host_of_its_own(slurm_cluster: SlurmCluster) -> None:
    printed = slurm_cluster.run("srun", "-N3", "hostname")
    assert sorted(printed.split()) == ["n1", "n2", "n3"]


def test_tmp_and_shm_are_the_nodes_own_and_the_shared_directory_is_common(
    slurm_cluster: SlurmCluster,
) -> None:
    common = slurm_cluster.fresh("common")
    touch = f"touch /tmp/own-$(hostname) /dev/shm/own-$(hostname) {common}/$(hostname)"
    slurm_cluster.run("srun", "-N3", "sh", "-c", touch)
    seen = slurm_cluster.run("srun", "-N3", "sh", "-c", "echo $(hostname): /tmp/own* /dev/shm/own*")
    assert sorted(seen.splitlines()) == [
        f"{node}: /tmp/own-{node} /dev/shm/own-{node}" for node in ("n1", "n2", "n3")
    ]
    assert sorted(path.name for path in common.iterdir()) == ["n1", "n2", "n3"]
    assert not list(Path("/tmp").glob("own-n*")) + list(Path("/dev/shm").glob("own-n*"))


def test_nodes_see_the_repository(slurm_cluster: SlurmCluster) -> None:
    printed = slurm_cluster.run("srun", "-N1", "cat", str(REPOSITORY / "pyproject.toml"))
    assert 'name = "liver_hpc"' in printed


def test_fake_gpus_are_given_out(slurm_cluster: SlurmCluster) -> None:
    show = ("printenv", "CUDA_VISIBLE_DEVICES")
    assert slurm_cluster.run("srun", "-N1", "--gres=gpu:2", *show).strip() == "0,1"
    assert slurm_cluster.run("srun", "-N1", "--gres=gpu:1", *show).strip() == "0"


@pytest.mark.long
def test_a_stable_job_preempts_with_sigterm_at_the_start_of_the_grace_time(
    slurm_cluster: SlurmCluster,
) -> None:
    seen = slurm_cluster.fresh("preempted")
    # It notes the warning and stays as long as it may.
    step = f"trap 'test -e {seen}/warned || touch {seen}/warned' TERM; touch {seen}/$(hostname)"
    body = script(slurm_cluster, "step.sh", f"{step}\nwhile :; do sleep 0.1; done\n")
    job = slurm_cluster.run(
        *("sbatch", "--parsable", "-p", "preempt", "-N3", "--requeue", f"--output={seen}/log"),
        f"--wrap=srun {body}",
    ).strip()
    wait_for(lambda: len(list(seen.glob("n?"))) == 3, 15.0, "the preemptible step")

    slurm_cluster.run("srun", "-p", "stable", "-N1", "hostname", limit_s=40.0)
    started_s = time.time()
    warned_s = (seen / "warned").stat().st_mtime
    assert started_s - warned_s > slurm_cluster.grace_s - 1.0
    assert "Restarts=1" in slurm_cluster.run("scontrol", "show", "job", job)


def test_a_component_of_a_het_job_is_joined_while_the_first_one_works(
    slurm_cluster: SlurmCluster,
) -> None:
    seen = slurm_cluster.fresh("het")
    wait = f"hostname > {seen}/first; until test -e {seen}/end; do sleep 0.05; done"
    first = script(slurm_cluster, "first.sh", f"{wait}; touch {seen}/first-ended\n")
    join = "srun --het-group=1 sh -c"
    batch = script(
        slurm_cluster,
        "het.sh",
        "#SBATCH -p stable -N1\n#SBATCH hetjob\n#SBATCH -p preempt -N1\n"
        f"srun --het-group=0 {first} &\n"
        f"until test -e {seen}/first; do sleep 0.05; done\n"
        f"{join} 'hostname > {seen}/second'\n"
        f"{join} 'hostname > {seen}/third'\n"
        f"test -e {seen}/first-ended && touch {seen}/too-late\n"
        f"touch {seen}/end; wait; touch {seen}/over\n",
    )
    slurm_cluster.run("sbatch", "-W", f"--output={seen}/log", batch, limit_s=40.0)
    wait_for((seen / "over").exists, 20.0, f"the het job; {(seen / 'log').read_text()}")
    assert not (seen / "too-late").exists()
    assert (seen / "second").read_text() == (seen / "third").read_text()
    hosts = {(seen / name).read_text().strip() for name in ("first", "second")}
    assert len(hosts) == 2
    assert hosts < {"n1", "n2", "n3"}


@pytest.mark.long
def test_a_killed_node_fails_its_step_and_comes_back(slurm_cluster: SlurmCluster) -> None:
    seen = slurm_cluster.fresh("lost")
    note = f"touch {seen}/started; touch /tmp/before; exec sleep 300"
    step = slurm_cluster.start("srun", "-w", "n2", "sh", "-c", note)
    wait_for((seen / "started").exists, 15.0, "the step on n2")
    slurm_cluster.testbed("kill-node", "n2")
    assert "n2    down" in slurm_cluster.testbed("status")
    output, _ = step.communicate(timeout=60.0)
    # srun's exit status is 0 here: Slurm 22.05 tells of a lost node in words alone.
    assert "Node failure on n2" in output

    slurm_cluster.testbed("start-node", "n2")
    printed = slurm_cluster.run("srun", "-w", "n2", "sh", "-c", "hostname; ls /tmp")
    assert printed.split()[0] == "n2"
    assert "before" not in printed


def test_jobs_outlive_a_controller_that_is_killed(slurm_cluster: SlurmCluster) -> None:
    seen = slurm_cluster.fresh("outlived")
    count = f"touch {seen}/started; until test -e {seen}/go; do sleep 0.1; done; hostname"
    step = slurm_cluster.start("srun", "-w", "n2", "sh", "-c", count)
    wait_for((seen / "started").exists, 15.0, "the step on n2")
    # A job that slurmctld has not written down yet would be forgotten.
    written, started_s = slurm_cluster.place.root / "state" / "job_state", time.time()
    wait_for(lambda: written.stat().st_mtime > started_s, 30.0, "slurmctld to save its state")
    slurm_cluster.testbed("kill-controller")
    words = [("kill-controller",), ("exec", "--", "scontrol", "ping")]
    commands = [command_line(slurm_cluster.name, *line) for line in words]
    twice, ping = (slurm_cluster.attempt(command, limit_s=20.0) for command in commands)
    slurm_cluster.testbed("start-controller")
    assert "slurmctld" in twice.stderr
    assert "is DOWN" in ping.stdout
    assert "sh" in slurm_cluster.run("squeue", "--noheader", "--steps", "--format=%j")
    (seen / "go").touch()
    output, _ = step.communicate(timeout=30.0)
    assert "n2" in output.splitlines()


@pytest.fixture
def unlimited_again(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    slurm_cluster.testbed("limit", "n1")


TRANSFER = """
import pathlib, socket, sys, time
ready, count = pathlib.Path(sys.argv[2]), 5_000_000
if sys.argv[1] == "take":
    with socket.create_server(("10.77.0.1", 5555)) as server:
        ready.touch()
        connection, _ = server.accept()
        began_s, taken = time.monotonic(), 0
        while piece := connection.recv(1 << 16):
            taken += len(piece)
        print(taken, time.monotonic() - began_s)
else:
    with socket.create_connection(("ctl", 5555), timeout=20) as connection:
        connection.sendall(bytes(count))
"""


def transfer_s(cluster: SlurmCluster, name: str) -> float:
    """Seconds that 5 MB take from n1 to the control host."""
    program = cluster.shared / "transfer.py"
    program.write_text(TRANSFER, encoding="utf-8")
    ready = cluster.fresh(name) / "ready"
    taker = cluster.start("python3", str(program), "take", str(ready))
    wait_for(ready.exists, 10.0, "the taker of the bytes")
    cluster.run("srun", "-w", "n1", "python3", str(program), "give", str(ready))
    output, _ = taker.communicate(timeout=20.0)
    taken, seconds = output.split()
    assert int(taken) == 5_000_000
    return float(seconds)


def test_a_limited_link_is_slow(slurm_cluster: SlurmCluster, unlimited_again: None) -> None:
    assert transfer_s(slurm_cluster, "free") < 1.0
    slurm_cluster.testbed("limit", "n1", "--rate", "20mbit")
    assert 1.5 < transfer_s(slurm_cluster, "limited") < 6.0  # 2 s at the full rate
    slurm_cluster.testbed("limit", "n1")
    assert transfer_s(slurm_cluster, "free-again") < 1.0


class Outside:
    """What this machine shows of a cluster from outside, and what must not stay of it."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._place = cluster.place
        self._shared = cluster.shared
        self._mounted = self._mounts()
        self._links = sorted(Path("/sys/class/net").iterdir())
        self._kept = Kept()

    def _mounts(self) -> list[str]:
        """But those of tests that run beside this one, in directories of their own."""
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        own, tests = self._shared, self._shared.parents[1]

        def matters(point: Path) -> bool:
            return point.is_relative_to(own) or not point.is_relative_to(tests)

        return [line for line in lines if matters(Path(line.split()[4]))]

    def note_namespaces(self) -> None:
        """While it stands."""
        for pid in members(self._place, set()):
            self._kept.keep(pid)

    def check_nothing_left(self) -> None:
        assert not self._place.root.exists()
        assert [describe(pid) for pid in members(self._place, set())] == []
        with self._kept as kept:
            assert [describe(pid) for pid in inhabitants(kept.names)] == []
        assert self._mounts() == self._mounted
        assert sorted(Path("/sys/class/net").iterdir()) == self._links
        sockets = Path("/proc/net/unix").read_text(encoding="utf-8")
        assert str(self._place.root) not in sockets


@pytest.fixture
def second_cluster(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmCluster]:
    """Another one beside the session's, not up yet."""
    cluster = SlurmCluster(f"{slurm_cluster.name}-second", tmp_path)
    yield cluster
    cluster.testbed("down")


def test_down_leaves_nothing_and_other_clusters_alone(
    slurm_cluster: SlurmCluster, second_cluster: SlurmCluster
) -> None:
    outside = Outside(second_cluster)
    second_cluster.up(nodes=2)
    running = second_cluster.start("srun", "-N2", "sleep", "300")
    # It has nothing of the cluster's in its environment.
    unmarked = second_cluster.start("env", "-i", "/bin/sleep", "300")
    wait_for(lambda: "R" in second_cluster.run("squeue", "-h", "-o", "%t"), 15.0, "the job")
    outside.note_namespaces()
    second_cluster.testbed("down")
    outside.check_nothing_left()
    for process in (running, unmarked):
        process.communicate(timeout=5.0)
        assert process.returncode == -signal.SIGKILL
    second_cluster.testbed("down")  # of nothing is nothing
    assert len(slurm_cluster.run("srun", "-N3", "hostname").split()) == 3


@pytest.mark.parametrize(
    "moment", ["settings.json", "processes/ctl.json", "run/munge.socket", "processes/n1.json"]
)
def test_down_after_up_was_killed_in_the_middle(second_cluster: SlurmCluster, moment: str) -> None:
    outside = Outside(second_cluster)
    reached = second_cluster.place.root / moment
    up = subprocess.Popen(
        command_line(second_cluster.name, "up", "--nodes", "2"),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = Deadline.after(SystemClock(), 30.0, f"{moment} of a rising cluster")
    poll_until(reached.exists, deadline, interval_s=0.001)
    up.kill()
    up.wait(timeout=5.0)
    outside.note_namespaces()
    again = second_cluster.attempt(command_line(second_cluster.name, "up"), 30.0)
    assert again.returncode == 1
    assert "was never taken down" in again.stderr
    second_cluster.testbed("down")
    outside.check_nothing_left()


def test_a_namespace_that_is_kept_gives_its_number_to_nobody() -> None:
    """The kernel gives the lowest free number: `down` would kill what another cluster starts."""

    def start() -> tuple[subprocess.Popen[bytes], set[str]]:
        process = subprocess.Popen(["unshare", "--net", "--uts", "--ipc", "--", "sleep", "60"])
        deadline = Deadline.after(SystemClock(), 5.0, "namespaces of its own")
        poll_until(lambda: len(namespaces(process.pid) - namespaces(os.getpid())) == 3, deadline)
        return process, namespaces(process.pid) - namespaces(os.getpid())

    def end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(5.0)

    first, held = start()
    with Kept() as kept:
        kept.keep(first.pid)
        assert kept.names == held
        end(first)
        assert inhabitants(held) == []
        for _ in range(5):
            later, names = start()
            end(later)
            assert held.isdisjoint(names)


def test_commands_say_what_is_wrong(slurm_cluster: SlurmCluster) -> None:
    for words, complaint in (
        (("kill-node", "n9"), "no node 'n9'; there are n1, n2, n3"),
        (("start-node", "n1"), "n1 of cluster"),
        (("limit", "n1", "--rate", "fast"), "rate 'fast': wanted"),
        (("up", "--nodes", "0"), "nodes: wanted 1 to 200, got 0"),
        (("up",), "is up, or was never taken down"),
    ):
        done = slurm_cluster.attempt(command_line(slurm_cluster.name, *words), 30.0)
        assert (done.returncode, complaint in done.stderr) == (1, True), done.stderr
