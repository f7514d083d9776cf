"""One real Slurm for all tests that need one; where it may not be had, they say so loudly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from slurm.testbed import packages
from slurm.testbed.membership import load_holder, started_ticks
from slurm.testbed.settings import STATE_ROOT, ClusterError
from tests.cluster.harness import SlurmCluster
from tests.cluster.sites import Site

NODES = ("n1", "n2", "n3")
REASON = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def slurm_here(pytestconfig: pytest.Config) -> None:
    """Skips where Slurm may not be installed; under CI=true that is a failure."""
    reason = packages.why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"the Slurm tests must run under CI: {reason}")
    if reason:
        pytestconfig.stash[REASON] = reason
        pytest.skip(f"no Slurm: {reason}")
    # Clusters of test runs that were killed.
    for root in STATE_ROOT.glob("test-*"):
        if started_ticks(int(root.name.split("-")[1])) is None:
            SlurmCluster(root.name, root).testbed("down")


@pytest.fixture(scope="session")
def charliecloud_here(slurm_here: None, pytestconfig: pytest.Config) -> None:
    """The same for Charliecloud."""
    try:
        packages.install_missing({"ch-run": "charliecloud"})
    except ClusterError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the tests of containers must run under CI: {error}")
        pytestconfig.stash[REASON] = f"those of containers: {error}"
        pytest.skip(f"no containers: {error}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if reason := config.stash.get(REASON, ""):
        terminalreporter.section("THE SLURM TESTS DID NOT RUN", red=True)
        terminalreporter.write_line(reason)


@pytest.fixture(scope="session")
def slurm_cluster(
    slurm_here: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """Three nodes n1 to n3, partitions `stable` and `preempt`; each test finds them idle."""
    cluster = SlurmCluster(f"test-{os.getpid()}", tmp_path_factory.mktemp("shared"))
    cluster.up(nodes=len(NODES))
    yield cluster
    cluster.testbed("down")


@pytest.fixture(scope="session")
def run_cluster(
    slurm_here: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """Four nodes for whole runs, with times in which a busy machine leaves a node."""
    shared = tmp_path_factory.mktemp("runs")
    cluster = SlurmCluster(f"test-{os.getpid()}-runs", shared, grace_s=25, kill_wait_s=15)
    cluster.up(nodes=4)
    yield cluster
    cluster.testbed("down")


@pytest.fixture
def site(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Site:
    return Site(slurm_cluster, slurm_cluster.fresh(request.node.name))


@pytest.fixture(autouse=True)
def idle_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves in the session's cluster is ended before the next one."""
    yield
    if "slurm_cluster" not in request.fixturenames:
        return
    cluster: SlurmCluster = request.getfixturevalue("slurm_cluster")
    for node in NODES:
        if load_holder(cluster.place, node) is None:
            cluster.testbed("start-node", node)
    cluster.run("scancel", "--user=root", "--signal=KILL")
    cluster.run("scancel", "--user=root")

    def idle() -> bool:
        states = cluster.run("sinfo", "--noheader", "--partition=stable", "--format=%T")
        return set(states.split()) == {"idle"} and not cluster.run("squeue", "--noheader")

    # A node whose step ended unheard tells of it once a minute.
    deadline = Deadline.after(SystemClock(), 90.0, f"the nodes of {cluster.name} to be idle again")
    poll_until(idle, deadline, interval_s=0.2)
