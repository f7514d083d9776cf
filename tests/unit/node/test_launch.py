"""A launch of an agent without its agent."""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import NoReturn

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import DeadlineError
from liver_hpc.node.launch import Around, Launch
from liver_hpc.node.workers import WorkerPlan
from liver_hpc.rendezvous.mpi.process import MpiProcess


def test_a_joiner_that_does_not_end_takes_no_agent_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other launches run under that."""

    def stuck(joiner: MpiProcess, limit_s: float) -> NoReturn:
        raise DeadlineError("waited 5 s for killed processes [7] to end")

    plan = WorkerPlan(tmp_path, "a0", (), (), sheltered=False)
    selector, limits = selectors.DefaultSelector(), DeadlineSection()
    around = Around(
        agent="a0",
        limits=limits,
        secret=b"",
        clock=SystemClock(),
        selector=selector,
        in_thread=pytest.fail,
        tell=pytest.fail,
        relay=pytest.fail,
        cold=pytest.fail,
    )
    launch = Launch(plan, around)
    launch.start(None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(MpiProcess, "end", stuck)
            launch.stop(3, at_once=True)
            assert launch.look() == 3
        assert "killed processes [7]" in caplog.text
    finally:
        launch.end(0.0)
        selector.close()
