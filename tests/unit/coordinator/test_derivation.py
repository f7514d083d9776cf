"""A spec that a task on a node derives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.cluster.launcher import LaunchedAgent, Launcher
from liver_hpc.coordinator.derivation import DERIVED_FILE, _derive_by
from liver_hpc.errors import LiverError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.specs import Answer
from tests.unit.config.runs import minimal


class Deriving(LaunchedAgent):
    """The task, on another host."""

    def __init__(self, agent: str, derived: Path, spec: ModelSpec) -> None:
        super().__init__(agent)
        self._derived, self._spec = derived, spec

    def start(self) -> None:
        self._derived.write_text(Answer[ModelSpec](value=self._spec).model_dump_json())
        self.has_ended(0)

    def adopt(self, host: str, pid: int) -> bool:
        return False

    def kill(self) -> None:
        pass


def test_what_a_task_has_derived_on_another_host_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS believes for a while that a name is not there, as one that was to be removed, until the
    directory is opened."""
    config, derived, opened = minimal(), tmp_path / DERIVED_FILE, list[Path]()
    spec = gpt_spec(GPTConfig.model_validate(config.model))
    open_before, read = os.open, Path.read_bytes

    def open_(path: Path, *how: Any, **more: Any) -> int:
        opened.append(path)
        return open_before(path, *how, **more)

    def read_bytes(path: Path) -> bytes:
        if path == derived and tmp_path not in opened:
            raise FileNotFoundError(2, os.strerror(2), str(path))
        return read(path)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    task = Launcher(lambda launches: [Deriving(one.agent, derived, spec) for one in launches])
    assert _derive_by(task, config, tmp_path, "n1").tensors == spec.tensors


def test_what_an_earlier_task_has_left_is_not_the_answer_of_one_that_fails(tmp_path: Path) -> None:
    config, derived = minimal(), tmp_path / DERIVED_FILE
    spec = gpt_spec(GPTConfig.model_validate(config.model))
    derived.write_text(Answer[ModelSpec](value=spec).model_dump_json())

    class Failing(Deriving):
        def start(self) -> None:
            self.has_ended(1)

    task = Launcher(lambda launches: [Failing(one.agent, derived, spec) for one in launches])
    with pytest.raises(LiverError, match="exit code 1 on n1"):
        _derive_by(task, config, tmp_path, "n1")
