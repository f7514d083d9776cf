"""Process managers: what makes a process one of an MPI world.

A process without one can open a port, but two such processes cannot meet: the joiner needs one,
the rendezvous does not.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from liver_hpc.errors import ConfigError

NO_TOPOLOGY_FILE = {"HWLOC_XMLFILE": ""}
"""Belongs into the environment of an mpiexec.

Otherwise hydra's proxy writes the machine's topology to a file in /tmp for its MPI process; the
file stays there when the proxy is killed.
"""


def inherited_line(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The descriptors by which the process manager that started this process can be reached.

    None when there is none, as under a plain shell; under `srun --mpi=pmi2` there is one. None
    also in a world of several processes: MPI would wait in each for all the others.
    """
    descriptor = environment.get("PMI_FD", "")
    alone = environment.get("PMI_SIZE", "1") == "1"
    return (int(descriptor),) if descriptor.isdecimal() and alone else None


def under_mpiexec(command: Sequence[str]) -> list[str]:
    """`command` as the one process of an MPI world on this machine.

    hydra's mpiexec listens on every address and asks nobody for a secret: let it live briefly.
    Raises ConfigError when there is no mpiexec.
    """
    # Nothing about other hosts, and nothing asked of a resource manager around us.
    mpiexec = [find_mpiexec(), "-launcher", "fork", "-rmk", "user"]
    return [*mpiexec, "-localhost", "localhost", "-hosts", "localhost", "-n", "1", *command]


def find_mpiexec() -> str:
    """The mpiexec of the mpich wheel in this Python environment; others do not match its MPI."""
    for scripts in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        path = scripts / "mpiexec"
        if os.access(path, os.X_OK):
            return str(path)
    raise ConfigError(
        f"no mpiexec beside {sys.executable}; install the mpich wheel there: pip install mpich"
    )
