"""Runs whose shape changes live, from `liver submit` to the metrics file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from liver_hpc.metrics.records import StepRecord
from liver_hpc.operate import request, stop
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from tests.integration.runs import (
    finish,
    processes_of,
    run_config,
    start,
    wait_for_end,
    wait_until,
    watch,
)

pytestmark = pytest.mark.timeout(400)

FIVE_HANDOFFS = [
    {"at_step": 4, "layout": {"tp": 2, "dp": 2}},
    {"at_step": 16, "layout": {"pp": 2, "dp": 2}},
    {"at_step": 26, "replace": 1},
    {"at_step": 38, "layout": {"tp": 2}},
    {"at_step": 48, "layout": {"tp": 2, "dp": 2}},
]


def losses(steps: list[StepRecord]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step once, in order."""
    assert [record.step for record in steps] == list(range(len(steps)))
    return [(record.loss, record.grad_norm) for record in steps]


def test_loss_and_gradient_norm_of_a_run_with_five_handoffs_match_a_fixed_run(
    tmp_path: Path,
) -> None:
    """Relative difference at most 1e-4 at every one of 64 steps, in fp32."""
    steps = 64
    fixed = finish(start(run_config(tmp_path, steps)))
    elastic = finish(start(run_config(tmp_path, steps, notices=FIVE_HANDOFFS)))
    outcomes = [(r.target, r.outcome, r.digest_equal) for r in elastic.reconfigurations]
    assert outcomes == [
        ("tp2 pp1 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp1 pp2 dp2", "completed", True),
        ("tp2 pp1 dp1", "completed", True),
        ("tp2 pp1 dp2", "completed", True),
    ]
    pairs = zip(losses(fixed.steps), losses(elastic.steps), strict=True)
    worst = [
        max(abs(ours - theirs) / abs(theirs) for (theirs, ours) in zip(*pair, strict=True))
        for pair in pairs
    ]
    assert len(worst) == steps
    assert max(worst) <= 1e-4, worst
    learning_rates = [record.learning_rate for record in elastic.steps]
    assert learning_rates == [record.learning_rate for record in fixed.steps]


def test_a_run_whose_workers_are_replaced_is_bit_equal_to_one_whose_are_not(
    tmp_path: Path,
) -> None:
    """Same layout, other processes: every loss and gradient norm equal to the last bit."""
    notices = [{"at_step": 3, "replace": 0}, {"at_step": 14, "replace": 1}]
    stayed = finish(start(run_config(tmp_path, 26)))
    moved = finish(start(run_config(tmp_path, 26, notices=notices)))
    assert [r.target_workers for r in moved.reconfigurations] == ["2,1", "2,3"]
    assert losses(moved.steps) == losses(stayed.steps)


@pytest.mark.parametrize("phase", ["PREPARE", "TRANSFER", "COMMIT"])
def test_a_joiner_that_is_killed_costs_the_attempt_and_the_next_resize_succeeds(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 2 dies by SIGKILL; the losses stay those of a run in which nothing happened."""
    monkeypatch.setenv("LIVER_TEST_FAULT", f"2:{phase}")
    notices = [
        {"at_step": 2, "layout": {"dp": 4}},
        {"at_step": 3, "layout": {"dp": 4}},
    ]
    config = run_config(tmp_path, 60, recipe="tests.integration.faulty:FaultyGPT", notices=notices)
    records = finish(start(config))
    first, second = records.reconfigurations
    assert first.outcome == "aborted"
    assert "2" in first.detail
    assert (second.outcome, second.digest_equal) == ("completed", True)
    monkeypatch.delenv("LIVER_TEST_FAULT")
    quiet = finish(start(run_config(tmp_path, 60)))
    pairs = zip(losses(records.steps), losses(quiet.steps), strict=True)
    assert all(abs(a - b) <= 1e-4 * abs(b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_a_lost_source_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, 2000))
    watch(run, lambda status: status.step >= 2, 60.0)
    victim = next(p for p in processes_of(run) if "liver_hpc.worker" in p.cmdline())
    victim.kill()
    outcome = wait_for_end(run, 60.0)
    assert outcome.state == "failed"
    assert "worker" in outcome.reason
    assert "lost" in outcome.reason
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


def test_operators_resize_replace_and_stop_a_run(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, 5000))
    watch(run, lambda status: status.step >= 2, 60.0)
    assert "started" in request(run, ResizeRequest(workers=4)).text
    assert "queued" in request(run, ReplaceRequest(replace=0)).text
    watch(run, lambda status: status.handoffs_done == 2, 90.0)
    watch(run, lambda status: len(status.workers) == 4 and 0 not in status.workers, 10.0)
    outcome = stop(run)
    assert outcome.state == "stopped"
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_after_sigkill_of_the_coordinator(tmp_path: Path, busy: bool) -> None:
    """Also in the middle of a handoff, with joiners booting."""
    shared_memory = set(os.listdir("/dev/shm"))
    run = start(run_config(tmp_path, 5000))
    watch(run, lambda status: status.step >= 2, 60.0)
    if busy:
        request(run, ResizeRequest(workers=4))
        watch(run, lambda status: status.handoff is not None, 10.0)
    address = run.coordinator()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(run), 20.0, f"processes {processes_of(run)}")
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_twenty_handoffs_in_a_row_leak_neither_descriptors_nor_memory(tmp_path: Path) -> None:
    """The stayers of the 20th handoff hold what they held after the 5th."""
    cycle = [{"pp": 2, "dp": 2}, {"dp": 4}, {"tp": 2, "dp": 2}]
    notices = [{"at_step": 2 + i, "layout": cycle[i % 3]} for i in range(20)]
    config = run_config(tmp_path, 400, initial=4, notices=notices)
    run = start(config)
    watch(run, lambda status: status.handoffs_done == 20, 200.0)
    stop(run)
    from liver_hpc.metrics.store import read_run

    rows = read_run(run.metrics_path).reconfigurations
    assert [row.outcome for row in rows] == ["completed"] * 20
    descriptors = [row.stayers_file_descriptors for row in rows]
    resident = [row.stayers_resident_bytes for row in rows]
    assert descriptors[19] <= descriptors[4], descriptors
    assert resident[19] <= resident[4] * 1.05, resident
