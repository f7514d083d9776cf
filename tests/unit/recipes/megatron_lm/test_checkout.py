"""A checkout of Megatron-LM beside what a process has imported of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.recipes.megatron_lm.checkout import check_imported
from liver_hpc.recipes.megatron_lm.options import ScriptOptions

INFO = 'MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = "rc0"\n'


def imported(checkout: Path, version: str) -> ModuleType:
    module = ModuleType("megatron.core")
    module.__file__ = str(checkout / "megatron" / "core" / "__init__.py")
    vars(module)["__version__"] = version
    return module


@pytest.fixture
def options(tmp_path: Path) -> ScriptOptions:
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(INFO)
    return ScriptOptions(script=tmp_path / "pretrain_gpt.py", args=[])


def test_another_release_that_was_checked_out_since_is_named(
    options: ScriptOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would have the core of one, from the process that forks it, and import the rest of
    the other."""
    monkeypatch.setitem(sys.modules, "megatron.core", imported(options.checkout, "0.16.1"))
    with pytest.raises(
        ConfigError, match=r"had megatron-core 0\.16\.1 when .*, and has 0\.17\.0rc0"
    ):
        check_imported(options)


def test_what_a_build_has_added_to_its_number_is_no_other_release(
    options: ScriptOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", imported(options.checkout, "0.17.0rc0+ab12"))
    check_imported(options)
