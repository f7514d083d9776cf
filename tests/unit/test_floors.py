"""The package's floors: a module imports only from its own folder or from a lower floor, and the
heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = {
    "liver_hpc": 0,
    "liver_hpc.errors": 0,
    "liver_hpc.clock": 0,
    "liver_hpc.lifeline": 0,
    "liver_hpc.arguments": 0,
    "liver_hpc.interfaces": 0,
    "liver_hpc.importing": 0,
    "liver_hpc.layout.coordinates": 0,  # the words that run files and messages are written in
    "liver_hpc.layout.tensors": 0,
    "liver_hpc.config": 1,
    "liver_hpc.layout": 2,
    "liver_hpc.protocol": 2,
    "liver_hpc.metrics": 2,
    "liver_hpc.cluster": 3,
    "liver_hpc.rendezvous": 3,
    "liver_hpc.transport": 3,
    "liver_hpc.world.cpu_modules": 3,  # megatron's imports, of whoever needs them
    "liver_hpc.recipes": 4,
    "liver_hpc.checkpoint.index": 4,  # what the coordinator and submission read of a checkpoint
    "liver_hpc.world": 5,
    "liver_hpc.checkpoint": 6,
    "liver_hpc.handoff": 6,
    "liver_hpc.simulation": 6,
    "liver_hpc.coordination": 6,
    "liver_hpc.baseline": 7,
    "liver_hpc.training": 7,
    "liver_hpc.joiner_process": 7,
    "liver_hpc.agent_channel": 7,
    "liver_hpc.node_workers": 7,
    "liver_hpc.serving": 8,
    "liver_hpc.agent": 9,
    "liver_hpc.keeper": 9,
    "liver_hpc.worker": 9,
    "liver_hpc.coordinator": 9,
    "liver_hpc.status_text": 10,
    "liver_hpc.follow": 10,
    "liver_hpc.run_directory": 10,
    "liver_hpc.hosting": 10,
    "liver_hpc.slurm_job": 11,
    "liver_hpc.dry_run": 11,
    "liver_hpc.launch": 12,
    "liver_hpc.operate": 12,
    "liver_hpc.doctor": 12,
    "liver_hpc.submit": 13,
    "liver_hpc.here": 14,
    "liver_hpc.resume": 14,
    "liver_hpc.cli": 15,
    "liver_hpc.__main__": 16,
}

ONLY_IN = {
    "torch": (
        "transport",
        "recipes",
        "world",
        "checkpoint",
        "handoff",
        "baseline",
        "training",
        "serving",
        "worker",
        "doctor",
    ),
    "megatron": ("recipes", "world", "baseline.megatron_storage"),
    "mpi4py": ("rendezvous",),
    "h5py": ("metrics", "checkpoint"),
    "matplotlib": ("metrics.plots",),
    "submitit": ("launch", "cluster"),
    "rich": ("cli", "follow", "metrics"),
}

ALLOWED = {
    # submit is cli's first command, and a name of its own for it.
    ("liver_hpc.submit", "liver_hpc.cli"),
}

PACKAGE = Path(__file__).parents[2] / "liver_hpc"
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
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
                is_module = (PACKAGE.parent / inner.replace(".", "/")).with_suffix(".py").exists()
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
        same_folder = module.count(".") > 1 and module.split(".")[1] == name.split(".")[1]
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
    folder = module.partition(".")[0]
    found = [
        f"{path.name}:{line} imports {name}"
        for line, name in imports(path)
        if not {folder, module} & {*ONLY_IN.get(name.partition(".")[0], (folder,))}
    ]
    assert found == []


def test_every_module_has_a_floor() -> None:
    """A new module at the top is named above, so that somebody has thought about its floor."""
    at_top = {module_name(path) for path in MODULES if path.parent == PACKAGE}
    inside = [path.relative_to(PACKAGE) for path in MODULES if path.parent != PACKAGE]
    folders = {f"liver_hpc.{path.parts[0]}" for path in inside}
    assert (at_top | folders) - FLOORS.keys() == set()
    missing = FLOORS.keys() - at_top - folders - set(map(module_name, MODULES))
    assert missing == set()


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("layout/plan.py", "liver_hpc.recipes.base"),
        ("config/load.py", "liver_hpc.layout.plan"),
        ("clock.py", "liver_hpc.config.schema"),
        ("rendezvous/channel.py", "liver_hpc.cluster.launcher"),
        ("worker.py", "liver_hpc.coordinator"),
    ],
)
def test_a_breach_would_be_noticed(module: str, imported: str) -> None:
    assert len(breaches(PACKAGE / module, iter([(1, imported)]))) == 1
