"""An image directory for Charliecloud, made of this machine's own files: it has this environment
with torch, and nothing of Slurm."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.cluster.harness import REPOSITORY

PYTHON = "/venv/bin/python"
"""What starts Python in the image."""

_EMPTY = ("dev", "proc", "sys", "tmp", "mnt", "root", "home", "run", "var/tmp", "usr/bin")
# What ch-run puts its own in the place of.
_FILES = ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf")
_BINARIES = ("sh", "env")


def make_image(image: Path) -> None:
    """Its files are hard links where the file systems are the same."""
    for name in _EMPTY:
        (image / name).mkdir(parents=True)
    for name in _FILES:
        (image / name).parent.mkdir(exist_ok=True)
        (image / name).touch()
    for name in ("lib", "lib64", "bin"):
        (image / name).symlink_to(f"usr/{name}")
    for name in _BINARIES:
        _link(shutil.which(name) or name, image / "usr/bin" / name)
    _system_libraries(image)
    _python(image)
    site = image / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for editable in site.glob("__editable__*liver*"):
        editable.unlink()
    shutil.copytree(REPOSITORY / "liver_hpc", site / "liver_hpc")


def _system_libraries(image: Path) -> None:
    """The loader and all libraries, but for Slurm's."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    (image / "usr/lib64").mkdir()
    _link(str(loader), image / "usr/lib64" / loader.name)
    here = Path("/usr/lib/x86_64-linux-gnu")
    there = image / here.relative_to("/")
    there.mkdir(parents=True)
    for path in here.glob("*.so*"):
        if path.exists() and not path.is_dir() and "slurm" not in path.name:
            _link(str(path), there / path.name)


def _python(image: Path) -> None:
    """The environment in /venv, and the Python that it is of where it is here."""
    base = Path(sys.base_prefix)
    there = image / base.relative_to("/")
    executable = Path(sys.executable).resolve()
    _link(str(executable), image / executable.relative_to("/"))
    stdlib = Path(sysconfig.get_path("stdlib"))
    ignored = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter")
    _tree(stdlib, image / stdlib.relative_to("/"), ignored)
    for library in (base / "lib").glob("libpython3*.so*"):
        _link(str(library), there / "lib" / library.name)
    _tree(Path(sys.prefix), image / "venv", None)
    (image / PYTHON.lstrip("/")).unlink()
    (image / PYTHON.lstrip("/")).symlink_to(executable)


def _tree(source: Path, target: Path, ignored: Callable[[str, list[str]], set[str]] | None) -> None:
    shutil.copytree(
        source, target, symlinks=True, ignore=ignored, copy_function=_link, dirs_exist_ok=True
    )


def _link(source: str, target: str | Path) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
