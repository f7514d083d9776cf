"""What an installed package has beside its modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_installed_package_has_all_files_and_says_that_it_has_types() -> None:
    """A type checker takes all of a package without the marker for Any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = {
        path
        for package, patterns in settings["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {path for path in (ROOT / "liver_hpc").rglob("*") if path.is_file()}
    assert ROOT / "liver_hpc" / "py.typed" in installed
    assert {path for path in files if path.suffix not in (".py", ".pyc")} == installed
