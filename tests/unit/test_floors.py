"""The package's floors: a module imports only from its own folder or from a lower floor, and the
heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = {
    "liver_hpc": 0,
    "liver_hpc.errors": 0,
    "liver_hpc.clock": 0,
    "liver_hpc.layout.coordinates": 0,  # the words that run files and messages are written in
    "liver_hpc.layout.tensors": 0,
    "liver_hpc.config": 1,
    "liver_hpc.host": 1,
    "liver_hpc.layout": 2,
    "liver_hpc.protocol": 2,
    "liver_hpc.run": 3,
    "liver_hpc.world.thread": 3,  # what the calling thread computes, which recipes may ask
    "liver_hpc.world.module_globals": 3,
    "liver_hpc.world.cpu_shim": 3,
    "liver_hpc.cluster": 4,
    "liver_hpc.rendezvous": 4,
    "liver_hpc.transport": 4,
    "liver_hpc.recipes": 4,
    "liver_hpc.world": 5,
    "liver_hpc.checkpoint": 6,
    "liver_hpc.handoff": 6,
    "liver_hpc.snapshot": 6,
    "liver_hpc.tracking": 6,
    "liver_hpc.report": 4,
    "liver_hpc.dashboard": 7,
    "liver_hpc.worker": 7,
    "liver_hpc.node": 7,
    "liver_hpc.coordinator": 7,
    "liver_hpc.doctor": 7,
    "liver_hpc.cli": 8,
    "liver_hpc.submit": 8,
    "liver_hpc.__main__": 8,
}

ONLY_IN = {
    "torch": (
        "transport",
        "recipes",
        "world",
        "checkpoint",
        "handoff",
        "snapshot",
        "worker",
        "doctor",
    ),
    "megatron": ("recipes", "world"),
    "mpi4py": ("rendezvous",),
    "xxhash": ("transport.checksum",),
    "h5py": ("report",),
    "matplotlib": ("report.drawings", "report.page"),
    "submitit": ("cli", "cluster"),
    "rich": ("cli", "report"),
    "tensorboard": ("tracking",),
    "wandb": ("tracking",),
    "prometheus_client": ("tracking",),
    "argcomplete": ("cli",),
}

ALLOWED = {
    # The command's other names.
    ("liver_hpc.submit", "liver_hpc.cli.main"),
    ("liver_hpc.__main__", "liver_hpc.cli.main"),
}

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "liver_hpc"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_FLOORS = 9
AT_TOP = {"__init__", "__main__", "clock", "errors", "submit"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def home(module: str) -> str | None:
    """The entry of FLOORS that a module belongs to: its own, or else its folder's."""
    while module and module not in FLOORS:
        module = module.rpartition(".")[0]
    return module or None


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                place = ROOT / inner.replace(".", "/")
                is_module = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                yield node.lineno, inner if is_module else node.module


def breaches(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    """Imports of a module from its own height or above, outside its folder."""
    module = module_name(path)
    own = home(module)
    assert own is not None
    found = []
    for line, name in lines:
        if not name.startswith("liver_hpc") or name == module or (module, name) in ALLOWED:
            continue
        there = home(name)
        assert there is not None
        same_folder = module.count(".") > 1 and module.split(".")[1] == (*name.split("."), "")[1]
        if not same_folder and FLOORS[there] >= FLOORS[own] > 0:
            found.append(
                f"{path.name}:{line} (floor {FLOORS[own]}) imports {name} ({FLOORS[there]})"
            )
        if FLOORS[own] == 0 and FLOORS[there] > 0:
            found.append(f"{path.name}:{line} (floor 0) imports {name} ({FLOORS[there]})")
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_come_from_lower_floors(path: Path) -> None:
    assert breaches(path, imports(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_heavy_libraries_stay_in_their_folders(path: Path) -> None:
    _, _, module = module_name(path).partition(".")
    parts = module.split(".")
    rooms = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    found = [
        f"{path.name}:{line} imports {name}"
        for line, name in imports(path)
        if not rooms & {*ONLY_IN.get(name.partition(".")[0], rooms)}
    ]
    assert found == []


def test_no_hash_but_sha256_is_asked_for() -> None:
    """Red Hat's Python in FIPS mode has neither MD5 nor a BLAKE2 whose size can be told."""
    others = re.compile(r"\b(md5|sha1|blake2[bs])\b")
    asking = {path.name for path in MODULES if others.search(path.read_text(encoding="utf-8"))}
    assert asking == set()


def test_every_module_has_a_floor() -> None:
    """No module lies loose in the package, and there are no more floors than can be remembered."""
    assert {path.stem for path in MODULES if path.parent == PACKAGE} == AT_TOP
    folders = {f"liver_hpc.{path.relative_to(PACKAGE).parts[0]}" for path in MODULES}
    assert {name for name in folders if not name.endswith(".py")} - FLOORS.keys() == set()
    assert FLOORS.keys() - folders - set(map(module_name, MODULES)) == set()
    assert len(set(FLOORS.values())) <= MOST_FLOORS


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, however far around."""
    found: list[list[str]] = []
    left = dict(graph)
    while left:
        free = [module for module, wants in left.items() if not wants & left.keys()]
        if not free:  # what is left are circles, and what leads into them
            wanted = set().union(*left.values())
            ends = [module for module in left if module not in wanted]
            if not ends:
                return [sorted(left)]
            free = ends
        for module in free:
            del left[module]
    return found


def test_nothing_is_imported_in_a_circle() -> None:
    """Wherever an import stands: in a function, or for the type checker alone."""
    paths = [
        path
        for folder in ("liver_hpc", "benchmarks", "slurm")
        for path in (ROOT / folder).rglob("*.py")
    ]
    names = {module_name(path) for path in paths}
    graph = {
        module_name(path): {name for _, name in imports(path)} & names - {module_name(path)}
        for path in paths
    }
    assert len(graph) > 200
    assert circles(graph) == []


def test_a_circle_would_be_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("layout/plan.py", "liver_hpc.recipes.base"),
        ("config/load.py", "liver_hpc.layout.plan"),
        ("clock.py", "liver_hpc.config.schema"),
        ("rendezvous/channel.py", "liver_hpc.cluster.launcher"),
        ("worker.py", "liver_hpc.coordinator.main"),
    ],
)
def test_a_breach_would_be_noticed(module: str, imported: str) -> None:
    assert len(breaches(PACKAGE / module, iter([(1, imported)]))) == 1
