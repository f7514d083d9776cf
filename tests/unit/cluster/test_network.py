"""Which interfaces and adapters a node uses: the run file, the environment, what is there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cluster import network
from liver_hpc.cluster.network import (
    NCCL_TELLS,
    HcaPort,
    NodeFacts,
    active_hca_ports,
    control_interface,
    nccl_files,
    nccl_log_path,
    node_facts,
    set_by_files,
    worker_network_environment,
)
from liver_hpc.config.schema import NetworkSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.interfaces import interface_towards

IB = (HcaPort("mlx5_0", 1, "InfiniBand"), HcaPort("mlx5_1", 1, "InfiniBand"))
ROCE = (HcaPort("mlx5_2", 1, "Ethernet"),)
INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"}


def node(**fields: Any) -> NodeFacts:
    values: dict[str, Any] = {"host": "n7", "interfaces": INTERFACES, "host_interface": "eth0"}
    return NodeFacts(**values | fields)


def chosen(facts: NodeFacts, environment: dict[str, str], **keys: Any) -> dict[str, str]:
    """What is set on a node of a Slurm cluster, without what only makes NCCL tell."""
    found = worker_network_environment(NetworkSection(**keys), "slurm", facts, environment)
    return {name: value for name, value in found.items() if name not in NCCL_TELLS}


def test_a_local_run_leaves_everything_alone_and_stays_on_loopback() -> None:
    facts = node()
    assert control_interface(NetworkSection(), "local", facts) is None
    assert worker_network_environment(NetworkSection(), "local", facts, {}) == NCCL_TELLS


@pytest.mark.parametrize(
    ("facts", "interface"),
    [
        (node(), "eth0"),
        (node(host_interface="ib0", route_interface="eth0"), "ib0"),
        (node(host_interface=None, route_interface="eth0"), "eth0"),
    ],
)
def test_on_slurm_control_traffic_takes_the_names_own_interface_else_the_default_routes(
    facts: NodeFacts, interface: str
) -> None:
    assert control_interface(NetworkSection(), "slurm", facts) == interface


def test_a_node_that_nobody_can_reach_says_so() -> None:
    facts = node(host_interface=None, route_interface=None, interfaces={"lo": "127.0.0.1"})
    told = r"none on node n7: .* no IPv4 address .* name one of lo \(127.0.0.1\)"
    with pytest.raises(ConfigError, match=told):
        control_interface(NetworkSection(), "slurm", facts)


@pytest.mark.parametrize("key", ["interface", "nccl_interface", "gloo_interface"])
def test_a_named_interface_that_a_node_lacks_is_an_error_with_what_there_is(key: str) -> None:
    wanted = rf"network.{key}: node n7 has no interface 'ib9' .* it has lo .*, eth0 .*, ib0 "
    with pytest.raises(ConfigError, match=wanted):
        chosen(node(), {}, **{key: "ib9"})


def test_the_run_file_beats_the_environment_and_that_beats_detection() -> None:
    environment = {
        "NCCL_SOCKET_IFNAME": "eth",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5_9",
    }
    facts = node(hca_ports=IB)
    assert chosen(facts, {}) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    }
    assert chosen(facts, environment) == {}
    named = {"nccl_interface": "ib0", "gloo_interface": "ib0, eth0", "ib_hca": "mlx5_1"}
    assert chosen(facts, environment, **named) == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "GLOO_SOCKET_IFNAME": "ib0, eth0",
        "NCCL_IB_HCA": "mlx5_1",
    }


def test_the_control_interface_is_the_default_of_the_others_and_yields_to_the_environment() -> None:
    both = {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert chosen(node(), {}, interface="ib0") == both
    assert chosen(node(), {"GLOO_SOCKET_IFNAME": "eth0"}, interface="ib0") == {
        "NCCL_SOCKET_IFNAME": "=ib0"
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [("eth0,ib0", "=eth0,ib0"), ("=eth0", "=eth0"), ("^docker,lo", "^docker,lo")],
)
def test_plain_names_are_told_to_nccl_as_exact_ones(given: str, told: str) -> None:
    assert chosen(node(), {}, nccl_interface=given)["NCCL_SOCKET_IFNAME"] == told


def test_ethernet_adapters_are_taken_where_there_is_no_infiniband() -> None:
    assert chosen(node(hca_ports=ROCE), {})["NCCL_IB_HCA"] == "=mlx5_2:1"
    assert chosen(node(hca_ports=(*IB, *ROCE)), {})["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"


@pytest.mark.parametrize(
    "given", ["mlx5", "mlx5_0", "mlx5_0:1", "=mlx5_1:1", "^mlx4", "=mlx5_0:1:0:1,mlx5_1::1"]
)
def test_adapters_in_nccls_syntax(given: str) -> None:
    assert chosen(node(hca_ports=IB), {}, ib_hca=given)["NCCL_IB_HCA"] == given


@pytest.mark.parametrize("given", ["mlx4", "mlx5_0:2", "=mlx5", "mlx5_0,hfi1_0", "mlx5_0:2:0"])
def test_an_adapter_that_a_node_lacks_is_an_error_with_what_there_is(given: str) -> None:
    with pytest.raises(ConfigError, match=r"node n7 .* active ports are mlx5_0:1, mlx5_1:1"):
        chosen(node(hca_ports=IB), {}, ib_hca=given)


def test_further_variables_of_nccl_beat_the_environment() -> None:
    found = worker_network_environment(
        NetworkSection(nccl={"NCCL_IB_TIMEOUT": 22, "NCCL_DEBUG": "WARN"}),
        "slurm",
        node(),
        {"NCCL_IB_TIMEOUT": "14", "NCCL_DEBUG_SUBSYS": "ALL"},
    )
    assert found == {
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }


@pytest.mark.parametrize(("given", "told"), [("1358,1214", "1214"), ("1358", None), ("", None)])
def test_of_slingshots_networks_the_jobs_is_taken_where_there_is_one(
    given: str, told: str | None
) -> None:
    assert chosen(node(), {"SLINGSHOT_VNIS": given}).get("SLINGSHOT_VNIS") == told


def test_what_a_file_of_nccls_sets_is_left_to_it_unless_the_run_file_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own, site = tmp_path / "own.conf", tmp_path / "nccl.conf"
    own.write_text("NCCL_DEBUG=WARN\n")
    site.write_text("#NCCL_SOCKET_IFNAME=ib7\nNCCL_IB_HCA=mlx5_0\n\nNCCL_DEBUG=INFO\nnothing\n")
    files = set_by_files([tmp_path / "none", own, site])
    assert files == {"NCCL_DEBUG": own, "NCCL_IB_HCA": site}
    facts = node(hca_ports=IB, nccl_files=files)
    found = worker_network_environment(NetworkSection(), "slurm", facts, {})
    subsystems = NCCL_TELLS["NCCL_DEBUG_SUBSYS"]
    assert found == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_DEBUG_SUBSYS": subsystems}
    assert f"NCCL_IB_HCA is that of {site}" in caplog.text
    assert chosen(facts, {}, ib_hca="mlx5_1")["NCCL_IB_HCA"] == "mlx5_1"


def test_nccl_reads_the_file_that_is_named_or_the_users_and_then_the_sites() -> None:
    site = Path("/etc/nccl.conf")
    assert nccl_files({"NCCL_CONF_FILE": "/opt/nccl.conf"}) == [Path("/opt/nccl.conf"), site]
    users, last = nccl_files({"NCCL_CONF_FILE": ""})
    assert (users.name, last) == (".nccl.conf", site)


def test_the_log_of_nccl_is_one_a_process_and_where_the_environment_says() -> None:
    path = nccl_log_path({}, Path("/run/logs"), node(), 42)
    assert path == Path("/run/logs/nccl-n7-42.log")
    told = {"NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"}
    assert nccl_log_path(told, Path("/run/logs"), node(host="n7.site"), 42) == Path(
        "/var/log/nccl.n7.42"
    )


def test_only_active_ports_count(tmp_path: Path) -> None:
    for adapter, port, state, layer in (
        ("mlx5_0", "1", "4: ACTIVE", "InfiniBand"),
        ("mlx5_0", "2", "1: DOWN", "InfiniBand"),
        ("mlx5_1", "1", "4: ACTIVE", "Ethernet"),
    ):
        directory = tmp_path / adapter / "ports" / port
        directory.mkdir(parents=True)
        (directory / "state").write_text(f"{state}\n")
        (directory / "link_layer").write_text(f"{layer}\n")
    assert list(active_hca_ports(tmp_path)) == [
        HcaPort("mlx5_0", 1, "InfiniBand"),
        HcaPort("mlx5_1", 1, "Ethernet"),
    ]
    assert list(active_hca_ports(tmp_path / "none")) == []


def test_the_way_to_loopback_is_the_loopback_interface() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None


@pytest.mark.parametrize(
    ("told", "route", "interface"),
    [
        (["169.254.95.120", "172.17.0.1", "10.1.0.7", "10.0.0.7"], "eth0", "eth0"),
        (["10.1.0.7"], "eth0", "ib0"),
        (["169.254.95.120", "10.1.0.7", "10.0.0.7"], None, "ib0"),
        (["169.254.95.120", "127.0.1.1"], "eth0", None),
    ],
)
def test_of_a_names_addresses_that_of_the_default_route_counts_and_never_a_bmcs(
    told: list[str], route: str | None, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd-resolved says a node all of its own, and glibc puts link-local ones first."""
    here = INTERFACES | {"usb0": "169.254.95.120", "docker0": "172.17.0.1"}
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in told]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    monkeypatch.setattr(network, "interface_addresses", lambda: here)
    monkeypatch.setattr(network, "interface_towards", lambda _: route)
    assert node_facts().host_interface == interface
