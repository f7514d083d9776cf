"""The coordinator's process: its files, its log, its signals."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordination.services import Services
from liver_hpc.coordinator import run_coordinator
from liver_hpc.protocol import messages as m
from tests.fakes import MemoryMetrics, tiny_recipe, tiny_run
from tests.scripted_cluster import ScriptedCluster

SECRET = b"s" * 32
LIMIT_S = 10.0
pytestmark = pytest.mark.timeout(60)


def _write_run(directory: Path, **sections: Any) -> None:
    (directory / "run.yaml").write_text(dump_run(tiny_run(**sections)))


def _scripted(cluster: ScriptedCluster) -> Callable[[RunConfig, Path, bytes], Services]:
    def build(config: RunConfig, directory: Path, secret: bytes) -> Services:
        cluster.secret = cluster.desk._secret = secret
        return Services(
            clock=SystemClock(),
            recipe=tiny_recipe(config),
            launcher=cluster.launcher,
            front_desk=cluster.desk,
            metrics=MemoryMetrics(),
        )

    return build


def test_the_process_stops_at_sigterm_and_leaves_its_outcome(tmp_path: Path) -> None:
    _write_run(tmp_path)
    cluster = ScriptedCluster(SECRET)
    before = signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "Begin")
        poll_until(lambda: bool(cluster.got(1, m.Begin)), deadline)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=terminate)
    killer.start()
    assert run_coordinator(str(tmp_path), _scripted(cluster)) == 0
    killer.join(LIMIT_S)

    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome == {"state": "stopped", "reason": "SIGTERM", "step": 0}
    assert not (tmp_path / "coordinator.json").exists()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert "[gen 0] INFO stopping: SIGTERM" in (tmp_path / "logs/coordinator.log").read_text()
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_process_reports_a_run_file_that_does_not_exist(tmp_path: Path) -> None:
    assert run_coordinator(str(tmp_path), _scripted(ScriptedCluster(SECRET))) == 1
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert "run.yaml" in outcome["reason"]
