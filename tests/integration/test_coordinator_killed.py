"""Runs whose coordinator is killed while they train, and that do not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from tests.integration.mortal import DEATHS, STILL
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("unhurried_steps")]

GROWS = [{"at_step": 6, "layout": {"tp": 2, "dp": 2}}]
MORTAL = "tests.integration.mortal:MortalGPT"


def losses(records: RunRecords) -> list[tuple[float, float]]:
    steps = [record.step for record in records.steps]
    assert steps == list(range(len(steps))), "each step is done once, in its order"
    return [(record.loss, record.grad_norm) for record in records.steps]


def kill(run: RunDirectory) -> int:
    """Kills the coordinator that there is, once there is one; its number."""
    wait_until(lambda: run.coordinator() is not None, 30.0, f"the coordinator of {run}")
    address = run.coordinator()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    return address.epoch


def await_next(run: RunDirectory, epoch: int) -> None:
    def is_there() -> bool:
        address = run.coordinator()
        return address is not None and address.epoch > epoch

    wait_until(is_there, 60.0, f"a coordinator of {run} after {epoch}")


def lives(run: RunDirectory, pid: int) -> bool:
    return pid in {process.pid for process in processes_of(run)}


def ended_well(run: RunDirectory, quiet: RunRecords) -> RunRecords:
    """Stops the run, by the coordinator that there is by now; all its steps were done once, as if
    nothing had happened; nothing is left."""
    records = stop_and_read(run)
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
    assert records.recoveries == []
    wait_until(lambda: not processes_of(run), 20.0, f"the end of {processes_of(run)}")
    return records


def test_killed_three_times_and_once_in_a_handoff_the_run_has_the_same_losses(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEATHS, "vote:after")
    tracking = {"tensorboard": {}}
    run = start(run_config(tmp_path, ENDLESS, notices=GROWS, recipe=MORTAL, tracking=tracking))
    watch(run, lambda status: status.step >= 3, 100.0)
    await_next(run, kill(run))
    watch(run, lambda status: status.handoffs_done == 1, 100.0)
    assert (run.path / "died-vote-after").exists()
    await_next(run, kill(run))
    step = read_run(run.path).steps[-1].step
    watch(run, lambda status: status.step >= step + 5, 60.0)
    records = ended_well(run, quiet)
    assert [row.outcome for row in records.reconfigurations] == ["completed"]
    check_followed(run, records)


def check_followed(run: RunDirectory, records: RunRecords) -> None:
    """TensorBoard was told each step once, and the handoff, by one coordinator's process after the
    other; none failed."""
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = board.EventAccumulator(str(run.path / "tensorboard"), size_guidance={board.SCALARS: 0})
    reader.Reload()
    told = [(each.step, each.value) for each in reader.Scalars("train/loss")]
    assert told == [(row.step + 1, pytest.approx(row.loss)) for row in records.steps]
    assert len(reader.Tensors("events/handoff")) >= 1
    assert len([*(run.path / "tensorboard").iterdir()]) >= 2
    assert "ERROR" not in (run.path / "logs" / "tracking.log").read_text()


@pytest.mark.parametrize(
    "moment", ["vote:before", pytest.param("vote:after", marks=pytest.mark.long)]
)
def test_one_that_stands_still_and_wakes_leaves_all_to_the_one_that_has_taken_over(
    moment: str, tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was about to act in a handoff, and must not."""
    monkeypatch.setenv(DEATHS, moment)
    monkeypatch.setenv(STILL, "1")
    run = start(run_config(tmp_path, ENDLESS, notices=GROWS, recipe=MORTAL))
    stopped = run.path / f"died-{moment.replace(':', '-')}"
    wait_until(stopped.exists, 100.0, "the coordinator to stand still")
    still = run.coordinator()
    assert still is not None
    words = [sys.executable, "-m", "liver_hpc", "coordinate", str(run.path)]
    other = subprocess.Popen(words)
    try:
        await_next(run, still.epoch)
        watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == 1, 60.0)
        os.kill(still.pid, signal.SIGCONT)
        wait_until(lambda: not lives(run, still.pid), 20.0, "its end")
        step = read_run(run.path).steps[-1].step
        watch(run, lambda status: status.step >= step + 5, 60.0)
        records = ended_well(run, quiet)
        assert [row.outcome for row in records.reconfigurations] == ["completed"]
        assert other.wait(20.0) == 0
    finally:
        other.kill()


@pytest.mark.long
def test_one_that_stands_still_for_ever_is_followed_by_another_one(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """What has started it sees that its loop turns no more, and nobody has to ask for it."""
    run = start(run_config(tmp_path, ENDLESS, deadlines={"coordinator_s": 20.0}))
    watch(run, lambda status: status.step >= 3, 100.0)
    still = run.coordinator()
    assert still is not None
    os.kill(still.pid, signal.SIGSTOP)
    await_next(run, still.epoch)
    assert not lives(run, still.pid)
    step = read_run(run.path).steps[-1].step
    watch(run, lambda status: status.step >= step + 5, 60.0)
    ended_well(run, quiet)


MOMENTS = (
    "prepared:before",
    "prepared:after",
    "at_boundary:before",
    "at_boundary:after",
    "vote:before",
    "first_step:before",
    "first_step:after",
    "released:before",
    "released:after",
    "aborted:before",
    "aborted:after",
    "saved:before",
    "saved:after",
)


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_handoff_ends_in_one_of_its_worlds_whenever_the_coordinator_dies(
    moment: str, tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With snapshots taken beside, and a checkpoint just before. What was asked for has one more
    turn where its handoff fails for that, and none where it had failed before."""
    monkeypatch.setenv(DEATHS, moment)
    fails = moment.startswith("aborted")
    if fails:
        monkeypatch.setenv("LIVER_TEST_FAULT", "2:FLIP")
    sections = {"snapshots": {"every_steps": 1}, "checkpoint": {"every_steps": 5}}
    run = start(run_config(tmp_path, ENDLESS, notices=GROWS, recipe=MORTAL, **sections))
    watch(run, lambda status: status.handoffs_done + fails * status.handoffs_aborted >= 1, 100.0)
    assert (run.path / f"died-{moment.replace(':', '-')}").exists()
    step = read_run(run.path).steps[-1].step
    watch(run, lambda status: status.step >= step + 5, 60.0)
    records = ended_well(run, quiet)
    assert len(records.steps) > step
    outcomes = [row.outcome for row in records.reconfigurations]
    assert outcomes in ([["aborted"]] if fails else [["completed"], ["aborted", "completed"]])


@pytest.mark.parametrize("every_steps", [pytest.param(None, marks=pytest.mark.long), 10])
def test_a_run_that_ends_without_a_coordinator_has_finished_once_there_is_one(
    every_steps: int | None, tmp_path: Path
) -> None:
    """However long it takes, within `coordinator_s`, its workers wait to write the last checkpoint,
    and to be told to go."""
    short = {"release_s": 1.0, "exit_s": 1.0, "coordinator_s": 60.0}
    run = start(run_config(tmp_path, 10, deadlines=short, checkpoint={"every_steps": every_steps}))
    watch(run, lambda status: status.step >= 4, 100.0)
    address = run.coordinator()
    assert address is not None
    host = psutil.Process(address.pid).parent()
    assert host is not None
    host.suspend()  # else it starts the next one at once
    try:
        kill(run)
        time.sleep(10.0)  # six steps, and then longer than `release_s` and `exit_s`
    finally:
        host.resume()
    records = finish(run, 60.0)
    assert len(records.steps) == 10
    assert records.recoveries == []
    assert len([*run.checkpoints_path.glob("*10*")]) == (every_steps is not None)
