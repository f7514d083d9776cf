"""What MPI is told of the network: the run file, then the environment, then the way to the desk."""

from __future__ import annotations

import os

import pytest

from liver_hpc.rendezvous.mpi import calls

VARIABLES = (
    "MPIR_CVAR_CH4_NETMOD", "FI_PROVIDER", "FI_TCP_IFACE", "UCX_TLS", "UCX_NET_DEVICES"
)  # fmt: skip


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setattr(calls, "interface_towards", lambda host: "eth0")


def told(host: str, interface: str | None = None, netmod: str | None = None) -> dict[str, str]:
    """The variables as they are set afterwards."""
    assert calls._choose_network(host, interface, netmod) == os.environ[VARIABLES[0]]
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_by_default_ofi_over_tcp_on_the_way_to_the_desk() -> None:
    assert told("10.77.0.11") == {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
    }


def test_the_environment_beats_detection() -> None:
    given = {"MPIR_CVAR_CH4_NETMOD": "ucx", "FI_TCP_IFACE": "ib1", "UCX_NET_DEVICES": "mlx5_0:1"}
    os.environ.update(given)
    assert told("10.77.0.11").items() >= given.items()


def test_the_run_file_beats_the_environment() -> None:
    os.environ.update({"MPIR_CVAR_CH4_NETMOD": "ucx", "FI_TCP_IFACE": "ib1"})
    set_now = told("10.77.0.11", "ib0", "ofi")
    assert set_now["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    assert set_now["FI_TCP_IFACE"] == set_now["UCX_NET_DEVICES"] == "ib0"


def test_ucx_is_not_confined_to_loopback() -> None:
    assert "UCX_NET_DEVICES" not in told("127.0.0.1")
