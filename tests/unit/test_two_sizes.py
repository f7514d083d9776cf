"""The package in two sizes: the core's dependencies bring nothing of a worker's, and the core's
modules import nothing but them."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.test_floors import MODULES, ROOT, imports, module_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}
EXTRAS = {
    extra: {Requirement(line).name for line in lines}
    for extra, lines in PROJECT["optional-dependencies"].items()
}
WORKER = EXTRAS["worker"]
TRACKERS = EXTRAS["tensorboard"] | EXTRAS["wandb"] | EXTRAS["openmetrics"]

# Packages that are imported under another name, or not at all.
MODULES_OF = {
    "pyyaml": "yaml",
    "megatron-core": "megatron",
    "prometheus-client": "prometheus_client",
}
PARTS = {"pydantic_core": "pydantic"}
UNSEEN = {"mpich": "mpi4py loads it", "einops": "megatron imports it"}

# What begins on the host: the commands, the coordinator, the keeper of a burst allocation.
STARTS = ("cli", "coordinator", "report", "doctor.command", "node.keeper", "submit", "__main__")


def at_import(path: Path) -> Iterator[str]:
    """The modules that are imported with a module: not what its functions import, and not what is
    for the type checker."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    )
    lines = {line for node in later for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return (name for line, name in imports(path) if line not in lines)


def core() -> dict[str, Path]:
    """The modules that a host imports: those that it begins with, whatever functions of theirs
    import, and what all these import."""
    paths = {module_name(path): path for path in MODULES}
    prefixes = tuple(f"liver_hpc.{start}" for start in STARTS)
    starts = [name for name in paths if name.startswith(prefixes)]
    wanted = [*starts, *(name for start in starts for _, name in imports(paths[start]))]
    found = dict[str, Path]()
    while wanted:
        name = wanted.pop()
        if name in paths and name not in found:
            found[name] = paths[name]
            wanted += at_import(paths[name])
    return found


def third_party(names: Iterator[str]) -> set[str]:
    tops = {name.partition(".")[0] for name in names}
    return {PARTS.get(top, top) for top in tops - set(sys.stdlib_module_names) - {"liver_hpc"}}


def closure(packages: set[str]) -> set[str]:
    """These packages and all that pip would install with them."""
    found, wanted = set[str](), [*packages]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop().lower())
        if name in found:
            continue
        found.add(name)
        needs = map(Requirement, importlib.metadata.requires(name) or ())
        wanted += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_the_core_brings_nothing_of_a_workers() -> None:
    assert closure(CORE) & WORKER == set()
    assert not [name for name in closure(CORE) if re.match("torch|nvidia|triton|megatron", name)]
    assert {"torch", "einops"} <= closure(WORKER)


def test_the_core_imports_only_what_it_brings() -> None:
    modules = core()
    found = {name: third_party(at_import(path)) for name, path in modules.items()}
    known = {MODULES_OF.get(name, name) for name in CORE}
    assert {name: more for name, its in found.items() if (more := its - known)} == {}
    assert {"liver_hpc.coordinator.loop", "liver_hpc.cluster.slurm.launcher"} <= modules.keys()
    assert "liver_hpc.rendezvous.mpi.service" in modules
    assert not [
        name for name in modules if name.startswith(("liver_hpc.world.", "liver_hpc.worker"))
    ]


def test_nothing_is_brought_in_vain() -> None:
    used = set[str]().union(*(third_party(name for _, name in imports(path)) for path in MODULES))
    brought = CORE | WORKER | TRACKERS
    assert {MODULES_OF.get(name, name) for name in brought - UNSEEN.keys()} == used


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("submitit", "1.5.3"),  # each job imports pkg_resources, which it does not bring
    ],
)
def test_releases_that_are_known_to_fail_are_not_taken(name: str, release: str) -> None:
    """pip leaves an older one that is there as long as it will do."""
    (of,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == name)
    assert release not in of.specifier
