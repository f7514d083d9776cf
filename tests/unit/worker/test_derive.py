"""The process that derives a spec, as far as it goes without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.specs import Answer
from liver_hpc.worker import derive
from tests.unit.config.runs import minimal


def test_one_of_another_release_reads_no_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived = tmp_path / "derived.json"
    words = ["derive", str(tmp_path / "missing.yaml"), str(derived), "--version", "0.0.1"]
    monkeypatch.setattr(sys, "argv", words)
    assert derive.main() == 0
    with pytest.raises(ConfigError, match=r"and 0\.0\.1 for the host that asks: install the same"):
        Answer[ModelSpec].read(derived, minimal(), "no answer")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("transformer_engine.pytorch.module.base", "Transformer Engine builds its layers"),
        ("ctypes", "a library cannot be loaded here"),
    ],
)
def test_what_the_nodes_may_be_able_to_do_is_known_behind_another_error(
    module: str, why: str
) -> None:
    raising: dict[str, Any] = {"__name__": module}
    exec("def build(): raise AssertionError('needs CUDA')", raising)

    def told(build: Callable[[], None]) -> str:
        try:
            try:
                build()
            except (AssertionError, KeyError) as error:
                raise ConfigError(f"layouts.2: {error}") from error
        except ConfigError as error:
            return derive._why_not_here(error)
        raise AssertionError("nothing was raised")

    assert told(raising["build"]).startswith(why)
    assert not told(lambda: {}["no engine"])
