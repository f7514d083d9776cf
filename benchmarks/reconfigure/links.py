"""A sweep on the nodes of a test cluster, whose links carry what a variant wants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.baseline.workers import HERE, Node
from benchmarks.reconfigure.sweep import Cell, Sweep
from liver_hpc.errors import ConfigError
from slurm.testbed import cluster
from slurm.testbed.hosts import holder_of, in_network_of
from slurm.testbed.settings import Place, node_address


@contextmanager
def bounded(sweep: Sweep, cell: Cell) -> Iterator[None]:
    """The links of all nodes are bounded inside as the cell's variant wants. Raises ConfigError
    outside of the test cluster, ClusterError."""
    link = sweep.variant(cell.variant).link
    if sweep.testbed is None:
        yield
        return
    place = _place(sweep.testbed)
    names = place.settings().node_names
    try:
        for node in names:
            cluster.limit(place, node, link)
        yield
    finally:
        for node in names:
            cluster.limit(place, node, "")


def nodes(sweep: Sweep) -> tuple[Node, ...]:
    """Where a restart's workers run: one on each node of the test cluster, or all here."""
    if sweep.testbed is None:
        return HERE
    place = _place(sweep.testbed)
    return tuple(
        Node(node_address(node), in_network_of(holder_of(place, node)))
        for node in place.settings().node_names
    )


def _place(name: str) -> Place:
    place = Place(name)
    if os.environ.get("SLURM_CONF") != str(place.slurm_conf):
        raise ConfigError(
            f"this sweep runs inside the test cluster {name!r}: "
            f"python -m slurm.testbed --name {name} exec -- python -m benchmarks.reconfigure ..."
        )
    return place
