"""Which interfaces and adapters a node uses, from the run file, the environment, and what it has.

What the run file says beats the environment, and NCCL's files; these beat detection. Nodes differ,
so that all of this is asked on each node, when its process starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from liver_hpc.config.schema import NetworkSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.interfaces import (
    SOMEWHERE,
    hostname_addresses,
    interface_addresses,
    interface_holding,
    interface_towards,
)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NCCL_HCA = "NCCL_IB_HCA"
NCCL_LOG = "NCCL_DEBUG_FILE"
SLINGSHOT_NETWORKS = "SLINGSHOT_VNIS"
"""Of a step: "its own", or "its own,its job's". libfabric uses the first."""

NCCL_TELLS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
"""With these NCCL writes down which transport it chose, and over which links."""

_NCCL_CONF = Path("/etc/nccl.conf")
_INFINIBAND = Path("/sys/class/infiniband")
_ACTIVE = "4: ACTIVE"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HcaPort:
    """An active port of a host channel adapter; `link_layer` is "InfiniBand" or "Ethernet"."""

    adapter: str
    port: int
    link_layer: str

    def __str__(self) -> str:
        return f"{self.adapter}:{self.port}"


@dataclass(frozen=True)
class NodeFacts:
    """What a node has.

    interfaces: those that are up, with their IPv4 address. host_interface: the one whose address
    the node's name resolves to, of several that of the default route. route_interface: that of the
    default route. nccl_files: variables that a file sets which NCCL reads, and which.
    """

    host: str
    interfaces: dict[str, str]
    host_interface: str | None = None
    route_interface: str | None = None
    hca_ports: tuple[HcaPort, ...] = ()
    nccl_files: dict[str, Path] = field(default_factory=dict)


def node_facts() -> NodeFacts:
    """What this node has, as it is now."""
    host, interfaces = socket.gethostname(), interface_addresses()
    holders = (interface_holding(address, interfaces) for address in hostname_addresses(host))
    named, route = [*filter(None, holders)], interface_towards(SOMEWHERE)
    return NodeFacts(
        host=host,
        interfaces=interfaces,
        # To its own node systemd-resolved says all of its addresses, those of bridges too.
        host_interface=route if route in named else next(iter(named), None),
        route_interface=route,
        hca_ports=tuple(active_hca_ports()),
        nccl_files=set_by_files(nccl_files(os.environ)),
    )


def active_hca_ports(directory: Path = _INFINIBAND) -> Iterator[HcaPort]:
    """Ports of this node's adapters that are up, by name; none where there is no RDMA."""
    for state in sorted(directory.glob("*/ports/*/state")):
        port = state.parent
        try:
            if state.read_text(encoding="ascii").strip() != _ACTIVE:
                continue
            layer = (port / "link_layer").read_text(encoding="ascii").strip()
        except OSError:  # an adapter that is being taken away
            continue
        yield HcaPort(port.parent.parent.name, int(port.name), layer)


def nccl_files(environment: Mapping[str, str]) -> list[Path]:
    """What NCCL reads where the environment says nothing, the first before the second."""
    files = [_NCCL_CONF]
    if given := environment.get("NCCL_CONF_FILE"):
        files.insert(0, Path(given))
    else:
        with contextlib.suppress(KeyError):  # a user without an entry
            files.insert(0, Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf")
    return files


def set_by_files(files: Sequence[Path]) -> dict[str, Path]:
    """The variables that such files set, each with the file that counts; what cannot be read sets
    none."""
    found: dict[str, Path] = {}
    for file in files:
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                name, equals, _ = line.partition("=")
                if equals and not name.startswith("#"):
                    found.setdefault(name, file)
    return found


def control_interface(network: NetworkSection, kind: str, facts: NodeFacts) -> str | None:
    """The interface for control traffic; None for loopback. `kind` is "local" or "slurm".

    Raises ConfigError when the node has no such interface, or none at all that others reach.
    """
    if network.interface is not None:
        _require([network.interface], "interface", facts)
        return network.interface
    if kind != "slurm":
        return None
    for found in (facts.host_interface, facts.route_interface):
        if found in facts.interfaces:
            return found
    raise ConfigError(
        f"network.interface: found none on node {facts.host}: its name resolves to no IPv4 "
        f"address of its own, and it has no default route for IPv4; name one of {_listed(facts)}"
    )


def control_address(network: NetworkSection, kind: str) -> str:
    """The IPv4 address of this node's interface for control traffic; raises as that does."""
    facts = node_facts()
    interface = control_interface(network, kind, facts)
    return "127.0.0.1" if interface is None else facts.interfaces[interface]


def worker_network_environment(
    network: NetworkSection, kind: str, facts: NodeFacts, environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables to be set, over what the environment holds, before torch opens any connection. They
    beat NCCL's files.

    Raises ConfigError when the run file names an interface or adapter that the node lacks.
    """
    control = control_interface(network, kind, facts)
    found = dict(NCCL_TELLS)
    if network.interface is not None:
        found[GLOO_INTERFACE] = network.interface
    if control is not None:
        found[NCCL_INTERFACE] = f"={control}"
    if facts.hca_ports:
        # InfiniBand where there is any: the Ethernet ports beside it are for something else.
        infiniband = [port for port in facts.hca_ports if port.link_layer == "InfiniBand"]
        found[NCCL_HCA] = f"={','.join(map(str, infiniband or facts.hca_ports))}"
    told = {name: str(value) for name, value in network.nccl.items()}
    _, comma, of_the_job = environment.get(SLINGSHOT_NETWORKS, "").rpartition(",")
    if kind == "slurm" and comma:  # joiners are of other steps
        told[SLINGSHOT_NETWORKS] = of_the_job
    if network.gloo_interface is not None:
        _require(_names(network.gloo_interface), "gloo_interface", facts)
        told[GLOO_INTERFACE] = network.gloo_interface
    if network.nccl_interface is not None:
        told[NCCL_INTERFACE] = _nccl_interfaces(network.nccl_interface, facts)
    if network.ib_hca is not None:
        _require_hca(network.ib_hca, facts)
        told[NCCL_HCA] = network.ib_hca
    found = {name: value for name, value in found.items() if name not in environment}
    for name in (found.keys() & facts.nccl_files.keys()) - told.keys():
        _log.info("%s is that of %s", name, facts.nccl_files[name])
    return {name: value for name, value in found.items() if name not in facts.nccl_files} | told


def nccl_log_path(
    environment: Mapping[str, str], directory: Path, facts: NodeFacts, pid: int
) -> Path:
    """Where NCCL of process `pid` writes down what it does: where the environment says, else a
    file of its own in `directory`."""
    given = environment.get(NCCL_LOG)
    if given is None:
        return directory / f"nccl-{facts.host}-{pid}.log"
    # The two that NCCL itself replaces; it takes the name up to the first dot.
    return Path(given.replace("%h", facts.host.partition(".")[0]).replace("%p", str(pid)))


def is_own_nccl_log(path: str) -> bool:
    """Whether `nccl_log_path` names a log so where the environment names none."""
    return Path(path).match("logs/nccl-*.log")


def _nccl_interfaces(given: str, facts: NodeFacts) -> str:
    """Plain names mean just these interfaces; to NCCL they would be the beginnings of names."""
    if given.startswith("^"):
        return given
    names = _names(given.removeprefix("="))
    _require(names, "nccl_interface", facts)
    return f"={','.join(names)}"


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _require(names: list[str], key: str, facts: NodeFacts) -> None:
    for name in names:
        if name not in facts.interfaces:
            raise ConfigError(
                f"network.{key}: node {facts.host} has no interface {name!r} that is up and has "
                f"an IPv4 address; it has {_listed(facts)}"
            )


def _require_hca(given: str, facts: NodeFacts) -> None:
    """NCCL's syntax: names or beginnings of names with or without a port, after ^ or =."""
    if given.startswith("^"):
        return
    exact = given.startswith("=")
    for entry in _names(given.removeprefix("=")):
        name, port = [*entry.split(":"), ""][:2]  # behind them a rail and a plane, from 2.30 on
        meant = f"{re.escape(name)}{'' if exact else '.*'}:{re.escape(port) or '.*'}"
        if not any(re.fullmatch(meant, str(held)) for held in facts.hca_ports):
            ports = ", ".join(map(str, facts.hca_ports)) or "none"
            raise ConfigError(
                f"network.ib_hca: node {facts.host} has no active adapter port {entry!r}; "
                f"active ports are {ports}"
            )


def _listed(facts: NodeFacts) -> str:
    return ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items()) or "none"
