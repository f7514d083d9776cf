"""Runs to test the coordinator with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.run.events import Node
from tests.fakes import tiny_run
from tests.unit.coordinator.live import LiveRun, Start


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Start]:
    """Makes a run, by default starts it, and sees to its end; its journal is played again."""
    runs: list[LiveRun] = []

    def make(begin: bool = True, nodes: Sequence[Node] = (), **sections: Any) -> LiveRun:
        run = LiveRun(tmp_path, tiny_run(**sections), nodes)
        runs.append(run)
        if begin:
            run.start()
        return run

    yield make
    for run in runs:
        run.close()
        run.check_replay()
