"""Which MPI library the environment of an MPI process names, and its end."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

import pytest

from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.mpi import process, service
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.process import MpiProcess, wheel_library, with_library
from liver_hpc.rendezvous.mpi.service import Acceptor


def test_it_is_that_of_the_wheel_with_what_it_needs_before_the_machines() -> None:
    library = Path(sysconfig.get_path("data")).resolve() / "lib" / "libmpi.so.12"
    searched = f"{library.parent}/mpich:{library.parent}"
    assert with_library({"HOME": "/root"}) == {
        "HOME": "/root",
        "MPI4PY_LIBMPI": str(library),
        "LD_LIBRARY_PATH": searched,
    }
    assert with_library({"LD_LIBRARY_PATH": "/opt/efa/lib"})["LD_LIBRARY_PATH"] == (
        f"{searched}:/opt/efa/lib"
    )
    profiled = {"LD_PRELOAD": "/opt/darshan/libdarshan.so", "MPI4PY_MPIABI": "openmpi"}
    assert with_library(profiled) == with_library({})  # mpi4py looks into its own process first


def test_one_that_is_named_stays() -> None:
    given = {"MPI4PY_LIBMPI": "/opt/mpich/libmpi.so", "LD_LIBRARY_PATH": "/opt/mpich"}
    given["LD_PRELOAD"] = "/opt/darshan/libdarshan.so"
    assert with_library(given) == given


def test_without_the_wheel_mpi4py_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpich of conda's is none of pip's; and a wheel's list may be gone, or name what is not
    there."""
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "files", lambda name: None)
        assert wheel_library.__wrapped__() is None
        gone = importlib.metadata.PackagePath("../../lib/libmpi.so.12")
        gone.dist = importlib.metadata.distribution("pytest")
        patched.setattr(importlib.metadata, "files", lambda name: [gone])
        assert wheel_library.__wrapped__() is None
    monkeypatch.setattr(importlib.metadata, "files", _not_there)
    assert wheel_library.__wrapped__() is None
    monkeypatch.setattr(process, "wheel_library", lambda: None)
    assert with_library({"PATH": "/bin"}) == {"PATH": "/bin"}


def _not_there(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_who_has_taken_the_name_of_its_segment_does_not_keep_it_from_ending(
    tmp_path: Path,
) -> None:
    """A directory cannot be unlinked, as another user's file in /dev/shm cannot."""
    ended = MpiProcess("MPI", ["-c", "pass"])
    ended._segment = tmp_path
    ended.close()
    ended.close()
    assert ended.exit_code() is not None


def test_an_acceptor_that_does_not_open_its_port_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ENDPOINT", ("-c", "import time; time.sleep(60.0)"))
    monkeypatch.setattr(service, "_OPEN_S", 0.2)
    log = tmp_path / "rendezvous.log"
    waits = rf"^waited 0\.2 s for the acceptor to open its port; see {log}$"
    with pytest.raises(MeetingError, match=waits):
        Acceptor(MpiNetwork(), log)
