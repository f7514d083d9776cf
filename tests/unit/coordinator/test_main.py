"""The coordinator's process: its files, its log, its signals."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli.client import request
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.main import run_coordinator
from liver_hpc.coordinator.services import Services
from liver_hpc.errors import LiverError
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.node_events import Node
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
            rendezvous=cluster.desk,
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


def test_the_process_may_have_as_many_connections_as_the_host_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert run_coordinator(str(tmp_path), _scripted(ScriptedCluster(SECRET))) == 1
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_process_reports_a_run_file_that_does_not_exist(tmp_path: Path) -> None:
    assert run_coordinator(str(tmp_path), _scripted(ScriptedCluster(SECRET))) == 1
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert "run.yaml" in outcome["reason"]


class Lives:
    """A run in a thread, each life of it on a scripted cluster of its own."""

    def __init__(self, directory: Path, nodes: Sequence[Node], **sections: Any) -> None:
        _write_run(directory, **sections)
        self.run = RunDirectory(directory)
        self.clusters: list[ScriptedCluster] = []
        self._nodes = nodes
        self._thread = threading.Thread(
            target=run_coordinator, args=(str(directory), self._build), daemon=True
        )
        self._thread.start()

    def _build(self, config: RunConfig, directory: Path, secret: bytes) -> Services:
        cluster = ScriptedCluster(SECRET, self._nodes)
        services = _scripted(cluster)(config, directory, secret)
        self.clusters.append(cluster)
        return dataclasses.replace(services, pool=cluster.pool)

    def ask(self, message: m.FromOperator) -> m.Reply:
        return request(self.run, message)

    def status(self) -> StatusSnapshot:
        return StatusSnapshot.model_validate(self.ask(m.StatusRequest()).data)

    def await_status(self, life: int, condition: Callable[[StatusSnapshot], bool]) -> None:
        """Until the coordinator of this life says something that satisfies `condition`."""

        def holds() -> bool:
            if len(self.clusters) <= life or self.run.coordinator() is None:
                return False
            try:
                return condition(self.status())
            except LiverError:  # it ends, or begins
                return False

        deadline = Deadline.after(SystemClock(), LIMIT_S, f"the status of life {life}")
        poll_until(holds, deadline)

    def end(self) -> None:
        self.ask(m.StopRequest())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def _trains(workers: int, generation: int = 0) -> Callable[[StatusSnapshot], bool]:
    def holds(status: StatusSnapshot) -> bool:
        settled = status.state == "training" and status.handoff is None
        return settled and len(status.workers) == workers and status.generation >= generation

    return holds


def _on(status: StatusSnapshot, workers: int) -> list[str]:
    """The nodes on which so many run, in a run of two."""
    lines = [line.split()[0] for line in status.nodes if f": {workers} of 1 " in line]
    return lines if len(lines) == 2 else []


def test_what_operators_asked_for_holds_in_the_next_life_of_the_same_job(tmp_path: Path) -> None:
    nodes = [Node(f"n{number}", "main", slots=1) for number in (1, 2, 3, 4)]
    layouts = {n: [{"dp": n}] for n in (2, 3, 4)}
    lives = Lives(tmp_path, nodes, layouts=layouts, policy={"settle_s": 0.02, "retry_s": 0.3})
    lives.await_status(0, _trains(4))
    lives.ask(m.ResizeRequest(layout="dp=2"))
    lives.await_status(0, _trains(2))
    lives.await_status(0, lambda status: _on(status, 0) != [])
    used, free = (_on(lives.status(), workers) for workers in (1, 0))
    lives.ask(m.DrainRequest(node=free[0]))
    lives.ask(m.DrainRequest(node=free[1]))
    # One worker is left then, for which there is no layout: to the disk, and again from there.
    lives.clusters[0].pool.warn(used[1], window_s=600.0)

    lives.await_status(1, _trains(2))
    second = lives.clusters[1]
    assert sorted(request.node for request in second.launched) == sorted(used)
    assert sorted(second.pool.avoided) == sorted(free)
    lives.ask(m.DrainRequest(node=free[0], undo=True))
    second.pool.grant(Node("n5", "main", slots=1))  # room for four, but two are the bound
    lives.await_status(1, lambda status: any("n5" in line for line in status.nodes))
    second.train(2)
    lives.await_status(1, lambda status: status.step >= 2 and status.handoff is None)
    assert len(second.launched) == 2
    lives.end()
    assert len(lives.clusters) == 2
