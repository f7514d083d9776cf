"""What MPI is told of the network: the run file, then the environment, then the way to the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.mpi import network
from liver_hpc.rendezvous.mpi.network import MpiNetwork, RendezvousPlace, place_file

FAR = "10.77.0.11"


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda host: "eth0")


def test_by_default_ofi_over_tcp_on_the_way_to_the_rendezvous() -> None:
    assert MpiNetwork(FAR).variables({"PATH": "/bin"}) == {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
    }


def test_the_environment_beats_detection() -> None:
    given = {"MPIR_CVAR_CH4_NETMOD": "ucx", "FI_TCP_IFACE": "ib1"}
    assert MpiNetwork(FAR).variables(given).items() >= given.items()


@pytest.mark.parametrize("host", [FAR, "127.0.0.1"])
def test_what_other_libraries_are_told_is_not_for_the_meeting(host: str) -> None:
    others = {"FI_PROVIDER": "efa", "UCX_TLS": "rc", "UCX_NET_DEVICES": "mlx5_0:1"}
    told = MpiNetwork(host).variables(others)
    assert told == MpiNetwork(host).variables({})
    assert told.keys() >= others.keys(), "else it would stay in the environment"


def test_the_run_file_beats_the_environment() -> None:
    given = {"MPIR_CVAR_CH4_NETMOD": "ucx", "FI_TCP_IFACE": "ib1"}
    told = MpiNetwork(FAR, "ib0", "ofi").variables(given)
    assert told["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    assert told["FI_TCP_IFACE"] == told["UCX_NET_DEVICES"] == "ib0"


def test_ucx_is_not_confined_to_loopback() -> None:
    assert MpiNetwork().variables({})["UCX_NET_DEVICES"] == "all"


def test_no_interface_is_named_where_none_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_towards", lambda host: None)
    assert "FI_TCP_IFACE" not in MpiNetwork(FAR).variables({})


def test_joiners_are_told_the_netmod_that_the_rendezvous_goes_by() -> None:
    assert MpiNetwork(FAR).decided({}).netmod == "ofi"
    assert MpiNetwork(FAR).decided({"MPIR_CVAR_CH4_NETMOD": "ucx"}).netmod == "ucx"
    assert MpiNetwork(FAR, "ib0").decided({}) == MpiNetwork(FAR, "ib0", "ofi")


def test_the_place_of_a_rendezvous_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert RendezvousPlace.read(tmp_path) is None
    place = RendezvousPlace(network=MpiNetwork(FAR, None, "ofi"), port=4711)
    place_file(tmp_path).write_text(place.model_dump_json())
    assert RendezvousPlace.read(tmp_path) == place
    place_file(tmp_path).write_text("node0:4711")
    with pytest.raises(MeetingError, match=r"rendezvous\.json: not a rendezvous"):
        RendezvousPlace.read(tmp_path)
