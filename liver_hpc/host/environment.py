"""The environment that a nested launch starts from."""

from __future__ import annotations

from collections.abc import Mapping

# What Slurm, a PMI server, Open MPI or MPICH's process manager tell the processes of one launch.
# Inherited by another one they give it the wrong nodes, ranks and sockets.
_FOREIGN_PREFIXES = ("SLURM_", "PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")
_KEPT = frozenset({"SLURM_CONF"})


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what belongs to the launch that this process came from.

    SLURM_CONF stays: it says where the cluster is, not who we are in it.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith(_FOREIGN_PREFIXES)
    }
