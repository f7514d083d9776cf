"""Runs that lose a worker without warning, and go on from the snapshots that the others hold."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc.cli.client import stop
from liver_hpc.config.schema import RunConfig
from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, read_entries
from tests.integration.faulty import SNAPSHOTS
from tests.integration.mortal import DEATHS
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
from tests.integration.stuck import AT_STEP

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

EVERY_STEP = {"every_steps": 1}


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


def config_of(tmp_path: Path, layout: dict[str, int], number: int, **sections: Any) -> RunConfig:
    """A run of one layout that may go on in smaller ones, and holds snapshots."""
    smaller = {few: [{"dp": few}] for few in range(1, number)}
    layouts = {**smaller, number: [layout]}
    sections = {"snapshots": EVERY_STEP, "workers": {"max": number}, **sections}
    return run_config(tmp_path, ENDLESS, number, layouts=layouts, **sections)


def recovered(run: RunDirectory, quiet: RunRecords, times: int = 1) -> RunRecords:
    """Once it has trained on for some steps after that; as if nothing had happened."""
    records = trained_on(run, times)
    assert worst_difference(newest(records), newest(quiet)) <= 1e-4
    return records


def trained_on(run: RunDirectory, times: int = 1) -> RunRecords:
    watch(run, lambda status: len(read_run(run.path).recoveries) == times, 90.0)
    step = read_run(run.path).recoveries[-1].step
    watch(run, lambda status: status.step >= step + 6 and status.handoff is None, 90.0)
    records = stop_and_read(run)
    wait_until(lambda: not processes_of(run), 20.0, f"the end of {processes_of(run)}")
    return records


def lost_and_replaced(run: RunDirectory, victim: int, quiet: RunRecords) -> None:
    """Until the run is back in its first layout, with another one in the victim's place."""
    watch(run, lambda status: status.handoffs_done == 1, 90.0)
    records = recovered(run, quiet)
    (recovery,), (back,) = records.recoveries, records.reconfigurations
    assert (recovery.lost, recovery.steps_redone) in ((str(victim), 0), (str(victim), 1))
    assert (back.target, back.outcome) == (recovery.source, "completed")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "workers", "victim"),
    [
        ({"dp": 2}, 2, 1),
        ({"tp": 2}, 2, 0),
        ({"pp": 2}, 2, 1),
        ({"pp": 2, "dp": 2}, 4, 2),
        ({"tp": 2, "dp": 2}, 4, 3),
    ],
)
def test_a_killed_worker_costs_a_step_at_most_and_the_losses_stay(
    layout: dict[str, int], workers: int, victim: int, tmp_path: Path, quiet: RunRecords
) -> None:
    """It is lost without a word; the others go on in the best layout that they have, and back in
    the first one once somebody has come in its place."""
    run = start(config_of(tmp_path, layout, workers))
    watch(run, lambda status: status.step >= 5, 150.0)
    kill(run, victim)
    lost_and_replaced(run, victim, quiet)


@pytest.mark.parametrize("moment", ["TRANSFER", pytest.param("VERDICT", marks=pytest.mark.long)])
def test_a_source_worker_that_is_killed_in_a_handoff_costs_that_and_a_step(
    moment: str, tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIVER_TEST_FAULT", f"1:{moment}")
    notices = [{"at_step": 4, "layout": {"tp": 2, "dp": 2}}]
    layouts = {1: [{"dp": 1}], 2: [{"dp": 2}], 3: [{"dp": 3}], 4: [{"tp": 2, "dp": 2}]}
    run = start(
        run_config(
            tmp_path,
            ENDLESS,
            notices=notices,
            layouts=layouts,
            snapshots=EVERY_STEP,
            recipe="tests.integration.faulty:FaultyGPT",
        )
    )
    records = recovered(run, quiet)
    assert records.reconfigurations[0].outcome == "failed"
    assert records.recoveries[0].steps_redone <= 1
    assert "1" in records.recoveries[0].lost.split(",")


@pytest.mark.long
def test_a_leaver_that_has_gone_back_when_a_source_worker_is_killed_still_gives_what_it_has(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the verdict; the target keeps a group of the source, which it has let go for
    that. Its copy of worker 1's share, and its own, are what is left of them."""
    monkeypatch.setenv("LIVER_TEST_FAULT", "1:TRANSFER")
    run = start(
        run_config(
            tmp_path,
            ENDLESS,
            initial=4,
            notices=[{"at_step": 4, "layout": {"tp": 2}}],
            layouts={2: [{"tp": 2}, {"dp": 2}], 3: [{"dp": 3}], 4: [{"tp": 2, "dp": 2}]},
            snapshots=EVERY_STEP,
            recipe="tests.integration.faulty:FaultyGPT",
        )
    )
    records = recovered(run, quiet)
    assert records.reconfigurations[0].outcome == "failed"
    (recovery,) = records.recoveries
    assert (recovery.lost, recovery.steps_redone <= 1) == ("1", True)


@pytest.mark.long
def test_a_loss_in_a_run_that_is_about_to_save_is_made_good_before_it_stops(tmp_path: Path) -> None:
    run = start(config_of(tmp_path, {"dp": 3}, 3))
    watch(run, lambda status: status.step >= 5, 150.0)
    os.kill(pid_of(run, 2), signal.SIGSTOP)  # so that nobody comes to the boundary
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop, run, checkpoint=True)
        watch(run, lambda status: status.state == "stopping", 30.0)
        kill(run, 2)
        outcome = stopping.result(150.0)
    (recovery,) = read_run(run.path).recoveries
    assert (recovery.lost, recovery.target) == ("2", "tp1 pp1 dp2")
    assert recovery.steps_redone <= 1
    assert outcome.state == "stopped"
    assert f"; checkpoint of step {outcome.step} in " in outcome.reason
    assert outcome.step >= recovery.step


@pytest.mark.long
def test_a_worker_whose_data_does_not_come_is_named_and_gone_on_without(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """It lives, and sends signs of life, while the other one waits for it."""
    deadlines = {"step_s": 3.0, "heartbeat_s": 8.0}
    recipe = "tests.integration.stuck:StuckGPT"
    run = start(config_of(tmp_path, {"dp": 2}, 2, recipe=recipe, deadlines=deadlines))
    records = recovered(run, quiet)
    (recovery,) = records.recoveries
    assert (recovery.lost, recovery.step) == ("1", AT_STEP)
    (held_up,) = (
        entry.event
        for entry in read_entries(run.path / JOURNAL_FILE)
        if entry.event["type"] == "held_up"
    )
    assert held_up["workers"] == [1]
    assert " in read" in held_up["text"]  # what is read ahead of it


@pytest.mark.long
def test_connections_to_a_partner_that_break_are_made_again(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does not notice, and a worker that is lost later costs a step at most, and is
    replaced by another one."""
    monkeypatch.setenv("LIVER_TEST_FAULT", "1:PARTNER")
    run = start(config_of(tmp_path, {"dp": 3}, 3, recipe="tests.integration.faulty:FaultyGPT"))
    watch(run, lambda status: "snapshots again, from that of step" in status.last_event, 150.0)
    failed = {
        (entry.event["generation"], entry.event["step"])
        for entry in read_entries(run.path / JOURNAL_FILE)
        if entry.event["type"] == "unprotected"
    }
    assert failed == {(0, SNAPSHOTS)}
    kill(run, 0)  # whose partner may say so, too, before it is told to stop
    lost_and_replaced(run, 0, quiet)


@pytest.mark.long
def test_the_coordinator_is_killed_as_the_partners_of_a_new_world_meet_through_it(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEATHS, "first_step:before")
    notices = [{"at_step": 4, "layout": {"dp": 3}}]
    sections = {"recipe": "tests.integration.mortal:MortalGPT", "snapshots": EVERY_STEP}
    layouts = {2: [{"dp": 2}], 3: [{"dp": 3}]}
    run = start(run_config(tmp_path, ENDLESS, notices=notices, layouts=layouts, **sections))
    watch(run, lambda status: status.handoffs_done == 1, 150.0)

    def has_snapshots() -> bool:
        events = (entry.event for entry in read_entries(run.path / JOURNAL_FILE))
        steps = (each for each in events if each["type"] == "step_done")
        return any(each["generation"] == 1 and each["snapshot"] is not None for each in steps)

    wait_until(has_snapshots, 60.0, "a snapshot of the new world")
    kill(run, 2)
    records = recovered(run, quiet)
    assert records.recoveries[0].steps_redone <= 1


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param({"dp": 2}, "fp32", marks=pytest.mark.long),
        pytest.param({"tp": 2}, "fp32", marks=pytest.mark.long),
        ({"dp": 2}, "bf16"),
    ],
)
def test_a_standby_takes_the_place_of_a_lost_worker_at_once(
    layout: dict[str, int],
    dtype: str,
    tmp_path: Path,
    quiet: RunRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same layout, so bit for bit. In bf16 parameters are cast from the main ones, which are
    what snapshots hold."""
    model = {"dtype": dtype}
    workers = {"max": 2, "standby": 1}
    run = start(config_of(tmp_path, layout, 2, workers=workers, model=model))
    watch(run, lambda status: status.spares == (2,) and status.step >= 5, 150.0)
    kill(run, 0)
    records = trained_on(run)
    (recovery,) = records.recoveries
    assert recovery.target == recovery.source
    assert not records.reconfigurations
    found = newest(records)
    if (layout, dtype) != ({"dp": 2}, "fp32"):  # which is that of `quiet`
        monkeypatch.delenv("LIVER_TEST_STEP_S")
        layouts = {2: [layout]}
        quiet = finish(start(run_config(tmp_path, len(found), layouts=layouts, model=model)))
    assert worst_difference(found, newest(quiet)) == 0.0


@pytest.mark.long
def test_another_one_is_lost_while_the_next_world_is_filled(
    tmp_path: Path, quiet: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers 0 and 2 do not hold copies of each other's shares."""
    monkeypatch.setenv("LIVER_TEST_FAULT", "2:REFILL")
    run = start(config_of(tmp_path, {"dp": 4}, 4, recipe="tests.integration.faulty:FaultyGPT"))
    watch(run, lambda status: status.step >= 5, 150.0)
    kill(run, 0)
    records = recovered(run, quiet)
    assert records.recoveries[0].lost == "0,2"
    assert records.recoveries[0].rounds == 2


@pytest.mark.long
def test_another_one_is_lost_before_the_next_world_has_a_snapshot(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """A survivor that had no seat there gives what it has, and has one afterwards. Workers 0 and 2
    do not hold copies of each other's shares."""
    layouts = {1: [{"dp": 1}], 2: [{"dp": 2}], 4: [{"dp": 4}]}
    sections = {"snapshots": EVERY_STEP, "workers": {"max": 4}}
    run = start(run_config(tmp_path, ENDLESS, 4, layouts=layouts, **sections))
    watch(run, lambda status: status.step >= 5, 150.0)
    kill(run, 0)
    wait_until(lambda: len(read_run(run.path).recoveries) == 1, 60.0, "the first recovery", 0.02)
    kill(run, 2)
    records = recovered(run, quiet, times=2)
    first, second = records.recoveries
    assert (first.target, second.target) == ("tp1 pp1 dp2", "tp1 pp1 dp2")
    assert (first.lost, second.lost) == ("0", "2")
    assert second.step == first.step


def test_a_worker_that_stands_still_is_lost_and_ends_once_it_wakes(
    tmp_path: Path, quiet: RunRecords
) -> None:
    run = start(config_of(tmp_path, {"dp": 2}, 2, deadlines={"heartbeat_s": 8.0}))
    watch(run, lambda status: status.step >= 5, 150.0)
    still = psutil.Process(pid_of(run, 1))
    still.suspend()
    watch(run, lambda status: status.generation > 0, 60.0)
    if still.is_running():
        still.resume()
    recovered(run, quiet)
    assert not still.is_running()


@pytest.mark.long
def test_where_no_boundary_is_left_whole_it_goes_on_from_the_checkpoint(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """A worker and the one that holds the copy of its share."""
    run = start(config_of(tmp_path, {"dp": 3}, 3, checkpoint={"every_steps": 4}))
    watch(run, lambda status: status.step >= 6, 150.0)
    for victim in (0, 1):
        kill(run, victim)
    wait_until(lambda: len(starts(run)) == 2, 90.0, "another start")
    watch(run, lambda status: status.step >= 12, 90.0)
    records = stop_and_read(run)
    assert not records.recoveries
    assert worst_difference(newest(records), newest(quiet)) <= 1e-4


def starts(run: RunDirectory) -> list[dict[str, Any]]:
    entries = read_entries(run.path / JOURNAL_FILE)
    return [each.event for each in entries if each.event["type"] == "coordinator_started"]
