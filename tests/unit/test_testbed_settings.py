"""What a test cluster is told, before anything of it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.errors import DeadlineError
from slurm.testbed import packages
from slurm.testbed.cluster import burst_bytes
from slurm.testbed.configuration import hosts, slurm_conf
from slurm.testbed.settings import ClusterError, Place, Settings, binds_needed


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"name": "../x"}, "cluster name"),
        ({"nodes": 0}, "nodes: wanted 1 to 200, got 0"),
        ({"gpus": -1}, "gpus: wanted 0 to 64, got -1"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, str | int], complaint: str) -> None:
    with pytest.raises(ClusterError, match=complaint):
        Settings(**values)  # type: ignore[arg-type]


def test_only_what_a_nodes_own_tmp_hides_is_bound(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    bound = binds_needed((str(tmp_path), str(inner), "/usr"))
    assert "/usr" not in bound
    assert str(inner) not in bound
    assert (str(tmp_path) in bound) == tmp_path.is_relative_to("/tmp")


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/no/such"])
def test_what_cannot_be_shared_is_refused(path: str) -> None:
    with pytest.raises(ClusterError, match=path):
        binds_needed((path,))


def test_slurm_conf_names_every_node_and_both_partitions() -> None:
    settings = Settings(nodes=2, grace_s=7, kill_wait_s=9, gpus=0)
    text = slurm_conf(settings, Place("liver", Path("/state")))
    assert "NodeName=n2 NodeAddr=10.77.0.12" in text
    assert "PartitionName=preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=7" in text
    assert "\nKillWait=9\n" in text
    assert "Gres=" not in text
    assert "{" not in text
    assert hosts(settings).splitlines()[1:] == ["10.77.0.1 ctl", "10.77.0.11 n1", "10.77.0.12 n2"]


@pytest.mark.parametrize(
    ("rate", "expected_bytes"), [("100mbit", 125_000), ("1gbit", 1_250_000), ("64kbit", 65_536)]
)
def test_a_limit_lets_ten_milliseconds_pass_at_once(rate: str, expected_bytes: int) -> None:
    assert burst_bytes(rate) == expected_bytes


def test_a_cluster_is_changed_by_one_command_at_a_time(tmp_path: Path) -> None:
    with (
        Place("one", tmp_path).locked(1.0),
        pytest.raises(DeadlineError, match="changing cluster 'one'"),
        Place("one", tmp_path).locked(0.2),
    ):
        pass
    with Place("one", tmp_path).locked(0.2):
        pass


def test_packages_that_cannot_be_had_are_named_with_apts_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packages, "why_not", lambda further: "")
    monkeypatch.setattr(packages, "INSTALL_LOCK", tmp_path / "lock")
    monkeypatch.setattr(packages, "PROGRAMS", {})
    monkeypatch.setattr(packages, "_apt", lambda *_: "E: Temporary failure resolving 'deb.debian'")
    with pytest.raises(ClusterError) as raised:
        packages.install_missing({"no-such-program": "no-such-package"})
    assert "apt-get could not install no-such-package:\nE: Temporary failure" in str(raised.value)
    assert packages.missing_packages() == []
