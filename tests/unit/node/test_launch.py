"""A launch of an agent without its agent."""

from __future__ import annotations

import selectors
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.node.launch import Around, Launch
from liver_hpc.node.workers import WorkerPlan
from liver_hpc.rendezvous.mpi import process
from liver_hpc.rendezvous.mpi.process import MpiProcess


def test_a_joiner_that_does_not_end_takes_no_agent_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other launches run under that."""

    def stuck(joiner: MpiProcess, limit_s: float) -> NoReturn:
        raise DeadlineError("waited 5 s for killed processes [7] to end")

    launch = a_launch(tmp_path)
    launch.start(None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(MpiProcess, "end", stuck)
            launch.stop(3, at_once=True)
            assert launch.look() == 3
        assert "killed processes [7]" in caplog.text
    finally:
        launch.end(0.0)


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_launch_that_lacks_a_thread_or_a_descriptor_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The agent's other launches train."""

    def refuse(*args: object) -> NoReturn:
        raise kind("there is none left")

    launch = a_launch(tmp_path)
    with monkeypatch.context() as patched:
        if kind is OSError:
            patched.setattr(process, "Pipe", refuse)
        else:
            patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LiverError, match="there is none left"):
            launch.start(None)
    launch.end(0.0)


def a_launch(directory: Path) -> Launch:
    around = Around(
        agent="a0",
        limits=DeadlineSection(),
        secret=b"",
        clock=SystemClock(),
        selector=selectors.DefaultSelector(),
        in_thread=pytest.fail,
        tell=pytest.fail,
        relay=pytest.fail,
        cold=pytest.fail,
    )
    return Launch(WorkerPlan(directory, "a0", (), (), sheltered=False), around)
