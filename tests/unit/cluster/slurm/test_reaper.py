"""For how long the jobs of a killed coordinator wait for another one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from liver_hpc.cluster.slurm import reaper
from liver_hpc.cluster.slurm.reaper import is_followed, stands
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.outcome import Outcome

LIMITS = DeadlineSection(coordinator_s=0.4, boot_s=1.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Of a coordinator, number 1."""
    monkeypatch.setattr(reaper, "_LOOK_S", 0.02)
    claim_epoch(tmp_path)
    return RunDirectory(tmp_path)


def test_nobody_comes(run: RunDirectory) -> None:
    assert not is_followed(run, 1, LIMITS)


def test_the_end_of_the_run_is_not_waited_beyond(run: RunDirectory) -> None:
    Outcome("finished", "all steps are done", 3).write(run.path)
    began_s = time.monotonic()
    assert not is_followed(run, 1, DeadlineSection())
    assert time.monotonic() - began_s < 10.0


def test_another_coordinator_is_waited_for_until_its_reaper_stands(run: RunDirectory) -> None:
    """It may be killed before it has one."""
    claim_epoch(run.path)
    touch = threading.Timer(0.8, stands(run, 2).touch)  # after coordinator_s
    touch.start()
    assert is_followed(run, 1, LIMITS)
    touch.join()


def test_another_coordinator_that_is_killed_before_it_has_a_reaper_is_nobody(
    run: RunDirectory,
) -> None:
    stands(run, 1).touch()
    claim_epoch(run.path)
    began_s = time.monotonic()
    assert not is_followed(run, 1, LIMITS)
    assert time.monotonic() - began_s >= 1.0
