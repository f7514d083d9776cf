"""No test of the commands waits for a model to be built, but those in test_stray_files.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from liver_hpc.cli import submission
from liver_hpc.run.directory import RunDirectory, create_run_directory, point_latest
from tests.unit.by_rule import by_rule
from tests.unit.config.runs import minimal


@pytest.fixture(autouse=True)
def spec_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "derive_spec", by_rule)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A local run whose process lives: this one."""
    monkeypatch.chdir(tmp_path)
    run = create_run_directory(minimal())
    point_latest(run)
    run.note_job_id(str(os.getpid()))
    (run.path / "logs").mkdir()
    return run
