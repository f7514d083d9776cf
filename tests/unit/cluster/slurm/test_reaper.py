"""For how long the jobs of a killed coordinator wait for another one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.cluster.slurm import reaper
from liver_hpc.cluster.slurm.reaper import is_followed, stands
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.outcome import Outcome
from tests.unit.config.runs import write_minimal

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


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("follows", [True, False])
def test_it_stands_whatever_signal_comes_and_cancels_what_nobody_takes_over(
    run: RunDirectory, follows: bool, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again until nothing is left: Slurm may be about to carry out a request."""
    stood, said = list[Any](), list[tuple[str, float]]()

    class Coordinator:
        """Ends; what there is of the reaper by then."""

        def read(self) -> bytes:
            ignored = [signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS]
            stood.append((ignored, stands(run, 1).stat().st_mode & 0o777))
            return b""

    class Slurm:
        def __init__(self, *_limits_s: float) -> None:
            self.left = ["PENDING", "RUNNING", "COMPLETING"]

        def cancel_named(self, name: str) -> None:
            said.append((name, time.monotonic()))

        def named(self, name: str) -> dict[str, Any]:
            said.append(("looks", time.monotonic()))
            return {"7": SimpleNamespace(state=self.left.pop(0))}

    write_minimal(run.path)
    monkeypatch.setattr(sys, "argv", ["reaper", "r-burst", str(run.path), "1"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Coordinator()))
    monkeypatch.setattr(reaper, "SlurmCommands", Slurm)
    monkeypatch.setattr(reaper, "SETTLE_S", 0.05)
    if follows:
        claim_epoch(run.path)
        stands(run, 2).touch()
    Outcome("stopped", "", 3).write(run.path)
    assert reaper.main() == 0
    assert stood == [([True, True, True], 0o600)]
    assert [name for name, _ in said] == ([] if follows else ["r-burst", "looks"] * 3)
    times_s = [at_s for _, at_s in said]
    assert all(b - a >= 0.05 for a, b in zip(times_s[::2], times_s[1::2], strict=True))
