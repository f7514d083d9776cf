"""The checks of nodes with probes of this machine, which a small program stands in for srun."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from liver_hpc.cluster.network import HcaPort, NodeFacts
from liver_hpc.config.schema import NetworkSection
from liver_hpc.doctor import nodes as doctor_nodes
from liver_hpc.doctor import probe
from liver_hpc.doctor.checks import Examination, Level, Result
from liver_hpc.doctor.nodes import NODE_CHECKS, PAIR_CHECKS, Nodes, _clocks, own_directory
from liver_hpc.errors import LiverError
from liver_hpc.rendezvous.handshake import ChannelClosed

LIMIT_S = 30.0

# Hands what it reads to a probe of each node.
SRUN = """
import os, subprocess, sys
words = [sys.executable, "-P", "-m", "liver_hpc.doctor.probe", *sys.argv[1:]]
probes = [
    subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "SLURMD_NODENAME": name})
    for name in ("n1", "n2")
]
for line in sys.stdin.buffer:
    for probe in probes:
        probe.stdin.write(line)
        probe.stdin.flush()
for probe in probes:
    probe.communicate()
"""


def nodes_in(directory: Path, interface: str = "lo") -> Nodes:
    network = NetworkSection(interface=interface).model_dump_json()
    nodes = Nodes(
        [sys.executable, "-c", SRUN, str(directory), network], 2, directory, probe.versions()
    )
    nodes.names = sorted(nodes.ask((), "hello", LIMIT_S))
    return nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with own_directory(tmp_path / "runs") as directory, closing(nodes_in(directory)) as started:
        assert started.names == ["n1", "n2"]
        yield started
    assert not (tmp_path / "runs").exists()


def found(nodes: Nodes, *names: str) -> dict[str, Result]:
    checks = [check for check in (*NODE_CHECKS, *PAIR_CHECKS) if check.name in names or not names]
    results: dict[str, Result] = {}
    Examination(results.__setitem__).run(checks, nodes)
    return results


def test_two_nodes_on_which_all_is_well(nodes: Nodes) -> None:
    results = found(nodes)
    levels = {name: result.level for name, result in results.items()}
    for name in ("locked memory", "threads"):  # as this machine has them
        del levels[name]
    assert levels.pop("nccl") in (Level.SKIP, Level.PASS)
    assert set(levels.values()) == {Level.PASS}, results
    assert "n1, n2: control traffic by lo 127.0.0.1" in results["interfaces"].found
    assert results["file locks"].found == "n1 can lock a file, and no other node then"
    assert "n2 met n1 (127.0.0.1)" in results["mpi meeting"].found
    assert "by gloo tcp (lo/127.0.0.1), not encrypted" in results["gloo"].found


def test_a_directory_of_one_host_alone(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    nodes.directory = tmp_path / "other"
    result = found(nodes, "shared directory")["shared directory"]
    assert result.level is Level.FAIL
    assert f"n1, n2: {tmp_path}/runs as the asking host has it is not there" in result.found
    assert "all nodes mount" in result.advice


@pytest.mark.parametrize(
    ("flock", "told"),
    [
        ("raise OSError(38, 'Function not implemented')", "the lock probe on n1: OSError: "),
        ("return None", "holds on one node alone: what n1 has locked n2 could lock, too"),
    ],
)
def test_a_file_system_without_locks_or_with_those_of_one_node_alone(
    flock: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = f"import fcntl\ndef flock(*_words):\n    {flock}\nfcntl.flock = flock\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with own_directory(tmp_path) as directory, closing(nodes_in(directory)) as nodes:
        result = found(nodes, "shared directory", "file locks")["file locks"]
    assert result.level is Level.FAIL
    assert told in result.found
    assert "-o flock" in result.advice


def test_what_the_asking_host_lacks_or_an_image_has_of_its_own_is_no_fault(nodes: Nodes) -> None:
    result = nodes.each("same_versions", wanted={"liver_hpc": probe.versions()["liver_hpc"]})
    assert result.level is Level.PASS
    assert f"torch {probe.versions()['torch']}" in result.found
    assert "as on the asking host: liver_hpc" in result.found


def test_what_one_node_lacks_is_told_of_it(nodes: Nodes) -> None:
    wanted = {**probe.versions(), "torch": "1.0"}
    result = nodes.each("same_versions", wanted=wanted)
    assert result.level is Level.FAIL
    assert "there 1.0" in result.found


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    with closing(nodes_in(tmp_path, interface="nowhere0")) as started:
        results = found(started, "interfaces", "gloo")
    assert results["interfaces"].level is Level.FAIL
    assert "no interface 'nowhere0'" in results["interfaces"].found
    assert results["gloo"].level is Level.SKIP


def test_a_probe_that_cannot_look_says_why(nodes: Nodes) -> None:
    with pytest.raises(
        LiverError, match=r"the join probe on n1: MeetingError: waited .* for the rendezvous"
    ):
        nodes.ask(["n1"], "join", LIMIT_S, within_s=0.2)


def test_where_no_meeting_can_be_opened_that_node_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with own_directory(tmp_path / "runs") as directory, closing(nodes_in(directory)) as started:
        result = found(started, "mpi meeting")["mpi meeting"]
    assert result.level is Level.FAIL
    assert "the rendezvous probe on n1: MeetingError" in result.found
    assert "/nowhere/libmpi.so" in result.found


def test_a_probe_that_hangs_holds_up_no_other(nodes: Nodes) -> None:
    at = nodes.one("n1", "store", LIMIT_S, within_s=LIMIT_S)["at"]
    waits = {"rank_0": "n1", "backend": "gloo", "at": at, "within_s": LIMIT_S}
    with pytest.raises(LiverError, match=r"waited 0.1 s for the measure probe on n1"):
        nodes.ask(["n1"], "measure", 0.1, **waits)
    assert nodes.ask(["n1"], "now", LIMIT_S).keys() == {"n1"}


def test_torchs_store_which_asks_nobody_listens_at_the_nodes_own_address_alone(
    tmp_path: Path,
) -> None:
    node = probe.Node("n1", tmp_path, NetworkSection(interface="lo"))
    host, port = probe.store(node, LIMIT_S)["at"]
    with socket.create_connection((host, port), LIMIT_S), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), LIMIT_S)
    node.held.close()


def test_clocks_that_are_apart_are_a_warning() -> None:
    said = {"n1": {"s": 1000.0}, "n2": {"s": 1003.0}}
    answers = SimpleNamespace(names=("n1", "n2"), ask=lambda *_: said)
    result = _clocks(cast(Nodes, answers))
    assert result.level is Level.WARN
    assert result.found.startswith("n2 is 3000.0 ms before n1")
    assert "by way of the disk" in result.advice


@pytest.mark.parametrize(
    ("limit_bytes", "level"), [(2**16, Level.WARN), (resource.RLIM_INFINITY, Level.PASS)]
)
def test_limited_memory_beside_an_adapter_is_a_warning(
    limit_bytes: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit_bytes, limit_bytes))
    node = probe.Node("n1", tmp_path, NetworkSection())
    node.facts = NodeFacts("n1", {}, hca_ports=(HcaPort("mlx5_0", 1, "InfiniBand"),))
    result = probe.locked_memory(node)
    assert result.level is level
    assert "mlx5_0:1/InfiniBand" in result.found


@pytest.mark.parametrize(
    ("limit", "workers", "level"), [(1700, 8, Level.WARN), (1700, 4, Level.PASS)]
)
def test_fewer_threads_than_a_node_wants_are_a_warning(
    limit: int, workers: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the limit that leaves least."""
    bounds = [probe.Bound("pids.max", 9000, 5000), probe.Bound("ulimit -Hu", limit, 900)]
    monkeypatch.setattr(probe, "thread_bounds", lambda: bounds)
    result = probe.threads(probe.Node("n1", tmp_path, NetworkSection()), workers)
    assert result.level is level
    assert ("ulimit -Hu lets this user have 1700, and 900 are there" in result.found) == bool(
        result.advice
    )
    monkeypatch.setattr(probe, "thread_bounds", list)
    assert "no limit" in probe.threads(probe.Node("n1", tmp_path, NetworkSection()), 8).found


def test_threads_are_bounded_for_the_user_and_by_the_cgroups_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].lstrip("/")
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "pids.max").write_text("500\n")
    (tmp_path / "pids.current").write_text("7\n")
    monkeypatch.setattr(probe, "CGROUPS", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 200))
    monkeypatch.setattr(os, "getuid", lambda: 1)
    assert [*probe.thread_bounds()] == [
        probe.Bound("ulimit -Hu", 200, 0),
        probe.Bound(f"{tmp_path}/pids.max", 500, 7),
    ]


def test_a_runs_directory_that_others_use_stays(tmp_path: Path) -> None:
    runs, before = tmp_path / "a" / "runs", os.umask(0)
    try:
        with own_directory(runs) as directory:
            modes = [oct(path.stat().st_mode)[-3:] for path in (directory, runs, runs.parent)]
            (runs / "another").mkdir()
    finally:
        os.umask(before)
    assert modes == ["700", "755", "755"]
    assert os.listdir(runs) == ["another"]


def test_a_host_that_does_not_come_to_where_a_coordinator_listens_is_told(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes meet, and `liver status` from here would reach none of them."""

    def connect(address: tuple[str, int], *_: object) -> None:
        raise ChannelClosed(f"n1 at {address[0]}: No route to host")

    monkeypatch.setattr(doctor_nodes, "connect", connect)
    result = found(nodes, "interfaces", "shared directory", "mpi meeting")["mpi meeting"]
    assert result.level is Level.WARN
    assert "n2 met n1 (127.0.0.1)" in result.found
    assert "this host does not come there: n1 at 127.0.0.1: No route to host" in result.found
    assert "network.interface" in result.advice
