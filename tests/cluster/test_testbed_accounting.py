"""A test cluster with slurmdbd: `sacct` works, and nothing of it stays either."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from slurm.testbed import packages
from slurm.testbed.configuration import slurm_conf
from slurm.testbed.errors import ClusterError
from slurm.testbed.settings import DATABASE_PORT, SLURMDBD_PORT, Place, Settings
from tests.cluster.harness import REPOSITORY, SlurmCluster, command_line
from tests.cluster.test_testbed import Outside

# An installation of the database falls into the first test.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]
UP = ("up", "--nodes", "1", "--accounting")
UP_LIMIT_S = 110.0


@pytest.fixture
def cluster(accounting_here: None, tmp_path: Path) -> Iterator[SlurmCluster]:
    """Not up yet; no other test of this process runs beside it."""
    cluster = SlurmCluster(f"test-{os.getpid()}-accounting", tmp_path)
    yield cluster
    cluster.testbed("down")


def accounted(cluster: SlurmCluster, fields: str) -> set[str]:
    return set(cluster.run("sacct", "--noheader", "--parsable2", f"--format={fields}").split("\n"))


def test_sacct_tells_of_jobs_that_are_over(cluster: SlurmCluster) -> None:
    outside = Outside(cluster)
    cluster.testbed(*UP, limit_s=UP_LIMIT_S)
    cluster.run("srun", "--job-name=good", "true")
    bad = cluster.attempt(
        command_line(cluster.name, "exec", "--", "srun", "-J", "bad", "false"), 30
    )
    assert bad.returncode != 0
    expected = {"good|COMPLETED|n1", "bad|FAILED|n1"}
    deadline = Deadline.after(SystemClock(), 30.0, "slurmdbd to hear of two jobs")
    poll_until(lambda: expected <= accounted(cluster, "JobName,State,NodeList"), deadline, 0.2)

    for port in (DATABASE_PORT, SLURMDBD_PORT):  # nobody hears of them outside
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
    for name in ("slurmdbd.conf", "database.sql"):
        assert (cluster.place.slurm_conf.with_name(name).stat().st_mode & 0o777) == 0o600
    outside.note_namespaces()
    cluster.testbed("down")
    outside.check_nothing_left()


@pytest.mark.parametrize("moment", ["database", "run/mariadb.socket", "log/slurmdbd.log"])
def test_down_after_up_was_killed_in_the_middle(cluster: SlurmCluster, moment: str) -> None:
    outside = Outside(cluster)
    reached = cluster.place.root / moment
    up = subprocess.Popen(
        command_line(cluster.name, *UP),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    poll_until(reached.exists, Deadline.after(SystemClock(), 60.0, f"{moment} of a cluster"), 0.001)
    up.kill()
    up.wait(timeout=5.0)
    outside.note_namespaces()
    cluster.testbed("down")
    outside.check_nothing_left()


# ---- without any cluster


def test_slurm_conf_names_slurmdbd_only_where_it_is_wanted() -> None:
    place = Place("liver", Path("/state"))
    with_it = slurm_conf(Settings(accounting=True), place)
    assert "AccountingStorageType=accounting_storage/slurmdbd\n" in with_it
    assert f"AccountingStoragePort={SLURMDBD_PORT}\n" in with_it
    without = slurm_conf(Settings(), place)
    assert "AccountingStorageType=accounting_storage/none\n" in without
    assert "slurmdbd" not in without


def test_packages_that_cannot_be_had_are_named_with_apts_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "why_not", lambda further: "")
    monkeypatch.setattr(packages, "ACCOUNTING_PROGRAMS", {"no-such-database": "no-such-package"})
    monkeypatch.setattr(packages, "_apt", lambda *_: "E: Temporary failure resolving 'deb.debian'")
    with pytest.raises(ClusterError) as raised:
        packages.install_missing(packages.ACCOUNTING_PROGRAMS)
    assert "apt-get could not install no-such-package:\nE: Temporary failure" in str(raised.value)
    assert "no-such-package" not in packages.missing_packages()
