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


def test_what_transformer_engine_has_raised_is_known_behind_another_error() -> None:
    engine: dict[str, Any] = {"__name__": "transformer_engine.pytorch.module.base"}
    exec("def build(): raise AssertionError('needs CUDA')", engine)

    def told(build: Callable[[], None]) -> bool:
        try:
            try:
                build()
            except (AssertionError, KeyError) as error:
                raise ConfigError(f"layouts.2: {error}") from error
        except ConfigError as error:
            return derive._in_transformer_engine(error)
        raise AssertionError("nothing was raised")

    assert told(engine["build"])
    assert not told(lambda: {}["no engine"])
