"""The address on which the coordinator listens, and at which the rendezvous is found."""

from __future__ import annotations

from liver_hpc.cluster.network import control_interface, node_facts
from liver_hpc.config.schema import NetworkSection

LOOPBACK = "127.0.0.1"


def control_address(network: NetworkSection, kind: str) -> str:
    """The IPv4 address of this node's interface for control traffic; `kind` is "local" or "slurm".

    Raises ConfigError that names the node and its interfaces when the one wanted has no address.
    """
    facts = node_facts()
    interface = control_interface(network, kind, facts)
    return LOOPBACK if interface is None else facts.interfaces[interface]
