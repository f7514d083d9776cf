"""Runs whose shape changes live, from `liver submit` to the metrics file."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.metrics.store import RunRecords, read_run
from liver_hpc.operate import request, stop
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from tests.integration.leftovers import no_abandoned_files
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_for_end,
    wait_until,
    watch,
)

pytestmark = pytest.mark.timeout(400)

SCHEDULE = {"decay_steps": 1000, "warmup_steps": 10}
QUIET_STEPS = 300

FIVE_HANDOFFS = [
    {"at_step": 4, "layout": {"tp": 2, "dp": 2}},
    {"at_step": 5, "layout": {"pp": 2, "dp": 2}},
    {"at_step": 6, "replace": 1},
    {"at_step": 7, "layout": {"tp": 2}},
    {"at_step": 8, "layout": {"tp": 2, "dp": 2}},
]
STEP_S = "0.3"
"""What a step takes at least while joiners boot beside it."""


@pytest.fixture(autouse=True)
def unhurried_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the machine time for joiners to boot beside training."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", STEP_S)


def elastic_run(tmp_path: Path, notices: list[dict[str, Any]], **sections: Any) -> RunRecords:
    """A run that stops a few steps after the last of its scripted handoffs has ended."""
    config = run_config(tmp_path, ENDLESS, notices=notices, schedule=SCHEDULE, **sections)
    run = start(config)
    watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == len(notices), 150.0)
    watch(run, lambda status: status.handoff is None and not status.queued, 10.0)
    last = read_run(run.metrics_path).reconfigurations[-1].step
    watch(run, lambda status: status.step >= max(60, last + 4), 60.0)
    return stop_and_read(run)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """The same training without any event, longer than any other run here."""
    config = run_config(tmp_path_factory.mktemp("quiet"), QUIET_STEPS, schedule=SCHEDULE)
    return finish(start(config))


def losses(records: RunRecords) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, each once and in order."""
    assert [record.step for record in records.steps] == list(range(len(records.steps)))
    return [(record.loss, record.grad_norm) for record in records.steps]


def worst_difference(ours: RunRecords, quiet: RunRecords) -> float:
    """The largest relative difference of loss or gradient norm over all steps of ours."""
    assert len(ours.steps) <= len(quiet.steps)
    pairs = zip(losses(ours), losses(quiet), strict=False)
    return max(abs(x - y) / abs(y) for pair in pairs for x, y in zip(*pair, strict=True))


def test_loss_and_gradient_norm_of_a_run_with_five_handoffs_match_a_fixed_run(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """Relative difference at most 1e-4 at every one of at least 60 steps, in fp32."""
    elastic = elastic_run(tmp_path, FIVE_HANDOFFS)
    outcomes = [(r.target, r.outcome, r.digest_equal) for r in elastic.reconfigurations]
    assert outcomes == [
        ("tp2 pp1 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp2 pp1 dp1", "completed", True),
        ("tp2 pp1 dp2", "completed", True),
    ]
    assert len(elastic.steps) >= 60
    assert worst_difference(elastic, quiet) <= 1e-4
    learning_rates = [record.learning_rate for record in elastic.steps]
    assert learning_rates == [r.learning_rate for r in quiet.steps][: len(learning_rates)]


def test_a_run_whose_workers_are_replaced_is_bit_equal_to_one_whose_are_not(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """Same layout, other processes: every loss and gradient norm equal to the last bit."""
    moved = elastic_run(tmp_path, [{"at_step": 2, "replace": 0}, {"at_step": 3, "replace": 1}])
    assert [r.target_workers for r in moved.reconfigurations] == ["2,1", "2,3"]
    assert losses(moved) == losses(quiet)[: len(moved.steps)]


def test_dropout_follows_the_samples_through_a_replacement_and_changes_of_pp_and_dp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-equal while the layout stays the same, within 1e-4 after; with dropout 0.1 throughout."""
    dropout = {"dropout": 0.1}
    notices = [
        {"at_step": 2, "replace": 0},
        {"at_step": 3, "layout": {"pp": 2, "dp": 2}},
        {"at_step": 4, "layout": {"dp": 2}},
    ]
    elastic = elastic_run(tmp_path, notices, model=dropout)
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    config = run_config(tmp_path, len(elastic.steps), schedule=SCHEDULE, model=dropout)
    fixed = finish(start(config))
    assert [r.outcome for r in elastic.reconfigurations] == ["completed"] * 3
    same_layout = elastic.reconfigurations[1].step
    assert losses(elastic)[:same_layout] == losses(fixed)[:same_layout]
    assert worst_difference(elastic, fixed) <= 1e-4


@pytest.mark.parametrize(
    ("phase", "then"),
    [("PREPARE", {"dp": 4}), ("TRANSFER", {"pp": 2}), ("COMMIT", {"pp": 2})],
)
def test_a_joiner_that_is_killed_costs_the_attempt_and_the_next_resize_succeeds(
    phase: str,
    then: dict[str, int],
    tmp_path: Path,
    quiet: RunRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 2 dies by SIGKILL; the losses stay those of a run in which nothing happened.

    The next resize waits in the queue. One that needs no joiners starts at the very moment at
    which the source workers go back, or rebuild.
    """
    monkeypatch.setenv("LIVER_TEST_FAULT", f"2:{phase}")
    notices = [
        {"at_step": 2, "layout": {"tp": 2, "dp": 2}},
        {"at_step": 3, "layout": then},
    ]
    records = elastic_run(tmp_path, notices, recipe="tests.integration.faulty:FaultyGPT")
    first, second = records.reconfigurations
    assert first.outcome == "aborted"
    assert f"{phase}: " in first.detail
    assert (second.outcome, second.digest_equal) == ("completed", True)
    assert worst_difference(records, quiet) <= 1e-4


def test_a_lost_source_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS))
    watch(run, lambda status: status.step >= 2, 60.0)
    victim = next(p for p in processes_of(run) if "liver_hpc.worker" in p.cmdline())
    victim.kill()
    outcome = wait_for_end(run, 60.0)
    assert outcome.state == "failed"
    assert "worker" in outcome.reason
    assert "lost" in outcome.reason
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


def test_operators_resize_replace_and_stop_a_run(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS))
    watch(run, lambda status: status.step >= 2, 60.0)
    assert "started" in request(run, ResizeRequest(workers=4)).text
    assert "queued" in request(run, ReplaceRequest(replace=0)).text
    watch(run, lambda status: status.handoffs_done == 2, 90.0)
    watch(run, lambda status: len(status.workers) == 4 and 0 not in status.workers, 10.0)
    outcome = stop(run)
    assert outcome.state == "stopped"
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")
    networks = read_run(run.metrics_path).networks
    assert [record.generation for record in networks] == [0, 1, 2]
    assert {record.transport for record in networks} == {"gloo tcp"}
    assert all("lo/127.0.0.1" in record.detail for record in networks)


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_after_sigkill_of_the_coordinator(tmp_path: Path, busy: bool) -> None:
    """Also in the middle of a handoff, with joiners booting."""
    with no_abandoned_files():
        run = start(run_config(tmp_path, ENDLESS))
        watch(run, lambda status: status.step >= 2, 60.0)
        if busy:
            request(run, ResizeRequest(workers=4))
            watch(run, lambda status: status.handoff is not None, 10.0)
        address = run.coordinator()
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(run), 20.0, f"processes {processes_of(run)}")


def test_twenty_handoffs_in_a_row_leak_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    """The stayers of the 20th handoff hold what they held after the 5th."""
    cycle = [{"pp": 2, "dp": 2}, {"dp": 4}, {"tp": 2, "dp": 2}]
    notices = [{"at_step": 2 + i, "layout": cycle[i % 3]} for i in range(20)]
    config = run_config(tmp_path, ENDLESS, initial=4, notices=notices)
    run = start(config)
    watch(run, lambda status: status.handoffs_done == 20, 200.0)
    rows = stop_and_read(run).reconfigurations
    assert [row.outcome for row in rows] == ["completed"] * 20
    descriptors = [row.stayers_file_descriptors for row in rows]
    resident = [row.stayers_resident_bytes for row in rows]
    assert descriptors[19] <= descriptors[4], descriptors
    assert resident[19] <= resident[4] * 1.05, resident
