"""Runs that lose a worker without warning, and go on from the snapshots that the others hold."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.report.store import RunRecords
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, read_entries
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    watch,
    worst_difference,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

QUIET_STEPS = 200
EVERY_STEP = {"every_steps": 1}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    return finish(start(run_config(tmp_path_factory.mktemp("quiet"), QUIET_STEPS)))


def newest(records: RunRecords) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step as it was done last."""
    found = {record.step: (record.loss, record.grad_norm) for record in records.steps}
    assert sorted(found) == list(range(len(found)))
    return [found[step] for step in sorted(found)]


def kill(run: RunDirectory, worker: int) -> None:
    """By SIGKILL, the worker itself."""
    os.kill(pid_of(run, worker), signal.SIGKILL)


def pid_of(run: RunDirectory, worker: int) -> int:
    for entry in read_entries(run.path / JOURNAL_FILE):
        if entry.event.get("type") == "hello" and entry.event["worker"] == worker:
            return int(entry.event["pid"])
    raise AssertionError(f"worker {worker} has never come")


@pytest.mark.parametrize(
    ("layout", "workers", "victim"),
    [({"dp": 2}, 2, 1), ({"tp": 2}, 2, 0), ({"pp": 2, "dp": 2}, 4, 2)],
    ids=["dp2", "tp2", "pp2 dp2"],
)
def test_a_killed_worker_costs_a_step_at_most_and_the_losses_stay(
    layout: dict[str, int],
    workers: int,
    victim: int,
    tmp_path: Path,
    quiet: RunRecords,
) -> None:
    layouts: dict[int, Any] = {1: [{"dp": 1}], 2: [{"dp": 2}], workers: [layout]}
    config = run_config(
        tmp_path, ENDLESS, workers, snapshots=EVERY_STEP, layouts=layouts, workers={"max": workers}
    )
    run = start(config)
    watch(run, lambda status: status.step >= 5, 150.0)
    kill(run, victim)
    watch(run, lambda status: status.generation > 0 and status.step >= 10, 60.0)
    watch(run, lambda status: status.step >= 40, 60.0)
    records = stop_and_read(run)
    (recovery,) = records.recoveries
    assert recovery.lost == str(victim)
    assert recovery.steps_redone <= 1
    assert worst_difference(newest(records), newest(quiet)) <= 1e-4
    assert not processes_of(run)
