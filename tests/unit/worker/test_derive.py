"""The process that derives a spec, as far as it goes without torch."""

from __future__ import annotations

import sys
from pathlib import Path

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
