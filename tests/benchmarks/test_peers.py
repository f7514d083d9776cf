"""The peers' benchmark: its arithmetic, what it says of what is missing, and torchrun for real."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.__main__ import result, run
from benchmarks.peers.events import JOIN, LEAVE, Change, Step, cost_of, merged
from benchmarks.peers.jobs import MARK
from benchmarks.peers.trial import LIVE, PEERS, QUICK, Peer, Row, Trial, try_peer
from liver_hpc.errors import LiverError

JOINED = Change(JOIN, 1, 2, noticed_s=103.5)


def steps_of(world: int, workers: int, begun_s: float, numbers: range, took_s: float) -> list[Step]:
    """One after the other."""
    return [
        Step(number, world, workers, begun_s + at * took_s, begun_s + (at + 1) * took_s, 2.0)
        for at, number in enumerate(numbers)
    ]


def test_lost_time_is_from_step_end_to_step_end_less_a_median_step() -> None:
    old = steps_of(1, 1, 100.0, range(5), 1.0)  # until 105
    new = [*steps_of(2, 2, 108.0, range(5, 6), 2.0), *steps_of(2, 2, 110.0, range(6, 9), 0.5)]
    cost = cost_of([*old, *new], JOINED)
    assert cost.lost_s == pytest.approx(110.0 - 105.0 - 0.5)
    assert cost.notice_to_first_step_s == pytest.approx(6.5)
    assert (cost.steps_again, cost.steps_between, cost.slowdown_s) == (0, 0, 0.0)


def test_steps_that_take_longer_beside_a_joiners_boot_are_a_cost() -> None:
    old = steps_of(1, 1, 100.0, range(3), 1.0)
    slow = steps_of(1, 1, 103.0, range(3, 5), 1.75)  # until 106.5, the notice is at 103.5
    new = steps_of(2, 2, 106.5, range(5, 9), 0.5)
    cost = cost_of([*old, *slow, *new], JOINED)
    assert (cost.lost_s, cost.slowdown_s) == (0.0, pytest.approx(1.5))


def test_steps_that_are_done_again_are_lost() -> None:
    old = steps_of(1, 1, 100.0, range(5), 1.0)
    cost = cost_of([*old, *steps_of(2, 2, 108.0, range(3, 9), 0.5)], JOINED)
    assert cost.steps_again == 2
    assert cost.lost_s == pytest.approx(108.5 - 103.0 - 0.5)


def test_a_step_in_which_a_newcomer_heals_costs_what_it_takes_longer() -> None:
    old = steps_of(1, 1, 100.0, range(5), 1.0)
    healing = steps_of(2, 1, 105.0, range(5, 6), 4.0)
    cost = cost_of([*old, *healing, *steps_of(2, 2, 109.0, range(6, 10), 0.5)], JOINED)
    assert cost.steps_between == 1
    assert cost.lost_s == pytest.approx(3.0)


def test_too_few_steps_are_no_measurement() -> None:
    old = steps_of(1, 1, 100.0, range(5), 1.0)
    with pytest.raises(LiverError, match="2 steps of the new world"):
        cost_of([*old, *steps_of(2, 2, 108.0, range(5, 7), 0.5)], JOINED)


def test_a_step_ends_when_its_last_worker_ends_it() -> None:
    parts = [Step(3, 7, 2, 1.0, 2.0, 4.0), Step(3, 7, 2, 1.5, 2.5, 2.0), Step(2, 7, 2, 0.5, 1.0, 1)]
    assert merged(Step.parse(part.line()) for part in parts) == [
        Step(2, 7, 2, 0.5, 1.0, 1.0),
        Step(3, 7, 2, 1.0, 2.5, 3.0),
    ]


def test_ratios_are_of_the_same_round_and_failures_are_rows() -> None:
    def trial(system: str, lost_s: float) -> Trial:
        return Trial([Row(system, LEAVE, lost_s=lost_s, slowdown_s=lost_s)])

    failed = Trial([Row("torchft", "none", detail="did not work: waited 9 s for a step")])
    found = result(
        {
            LIVE: [trial(LIVE, 0.1), trial(LIVE, 0.2), trial(LIVE, 0.1)],
            "torchft": [trial("torchft", 1.0), failed, trial("torchft", 3.0)],
        },
        [Row("refit", "refit", "a -> b", swap_s=3.0), Row("refit", "ours", "a -> b", swap_s=2.0)],
        repeats=3,
    )
    assert found.figures["torchft_leave_over_live"] == pytest.approx(20.0)
    assert found.figures["torchft_leave_lost_s"] == 2.0
    assert found.figures["torchft_leave_cost_s"] == 4.0
    assert found.figures["refit_a_to_b_over_transfer"] == 1.5
    assert found.repeats == 2
    assert len(found.rows) == 8
    assert sum("did not work" in row["detail"] for row in found.rows) == 1


def test_a_peer_that_is_missing_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Peer(PEERS["torchft"].job, "no_such_module", "no-such-package")
    monkeypatch.setitem(PEERS, "torchft", absent)
    (row,) = run(QUICK, ["torchft"]).rows
    assert math.isnan(row["lost_s"])
    assert row["detail"].startswith("not installed: pip install no-such-package")


@pytest.mark.long
@pytest.mark.timeout(150)
def test_torchrun_joins_and_leaves_no_process(tmp_path: Path) -> None:
    trial = try_peer("torchrun", replace(QUICK, events=(JOIN,)), tmp_path)
    (row,) = trial.rows
    assert (row.event, row.workers, row.steps_again) == (JOIN, "1 -> 2", 0)
    assert 0.0 < row.lost_s < row.notice_to_first_step_s
    assert not [process for process in psutil.process_iter() if _is_of_a_job(process, tmp_path)]


def _is_of_a_job(process: psutil.Process, directory: Path) -> bool:
    try:
        return any(name.startswith(MARK) for name in process.environ()) and str(
            directory
        ) in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
