"""How a joiner gets to its process manager, and what says so when there is none."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.rendezvous.mpi.process_manager import find_mpiexec, inherited_line, under_mpiexec


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "1"}, (9,)),
        ({"PMI_FD": "9"}, (9,)),
        ({"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "4"}, None),
        ({"PMI_FD": "none"}, None),
    ],
)
def test_a_process_manager_is_used_where_it_offers_a_world_of_one(
    environment: dict[str, str], line: tuple[int, ...] | None
) -> None:
    assert inherited_line(environment) == line


def test_the_mpiexec_of_this_environment_runs_the_command_once() -> None:
    command = under_mpiexec(["/bin/true", "x"])
    assert os.access(command[0], os.X_OK)
    assert Path(command[0]).name == "mpiexec"
    assert command[-4:] == ["-n", "1", "/bin/true", "x"]


def test_without_mpiexec_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="pip install mpich"):
        find_mpiexec()
