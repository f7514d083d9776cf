"""Where a handoff's lost time went, against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from liver_hpc.report.critical_path import CriticalPath, PathLines, critical_path
from liver_hpc.report.derive import run_figures
from liver_hpc.run.records import CrossingRecord, RunRecords
from tests.unit.report.rows import crossing, reconfiguration, step

MEDIAN_S = 0.5


def path_of(rows: list[CrossingRecord], **times: Any) -> CriticalPath | None:
    """Of an attempt whose source stops at 100 s; the target's first step ends at 101 s."""
    known = {"armed_s": 99.25, "source_last_step_ended_s": 100.0, "first_step_ended_s": 101.0}
    return critical_path(reconfiguration(**known | times), rows, MEDIAN_S)


def rows(**of_the_last: Any) -> list[CrossingRecord]:
    """Worker 1 begins and votes last, worker 2 ends last."""
    last: dict[str, Any] = {
        "worker": 1,
        "parameter_wire_s": 0.125,
        "parameter_pack_s": 0.0625,
        "parameter_digest_s": 0.03125,
        "started_s": 100.25,
        "forward_backward_s": 0.375,
        "optimizer_after_s": 0.0625,
        "voted_s": 100.6875,
        "update_s": 0.125,
        "ended_s": 100.9375,
    }
    return [
        _crossing(worker=0, voted_s=100.5, ended_s=100.9),
        crossing(**last | of_the_last),
        _crossing(worker=2, voted_s=100.625, update_s=0.1875, ended_s=101.0),
        _crossing(worker=3, started_s=100.6875, voted_s=100.6875, ended_s=math.nan),
    ]


def _crossing(**fields: Any) -> CrossingRecord:
    return crossing(**{"started_s": 99.5, "forward_backward_s": 0.25} | fields)


def test_each_part_is_of_the_worker_that_was_the_last_there() -> None:
    path = path_of(rows())
    assert path == CriticalPath(
        last_to_begin=1,
        last_to_vote=1,
        last_to_end=2,
        boundary_s=0.75,
        slow_first_step_s=0.375 + 0.1875 - MEDIAN_S,
        lines=PathLines(
            checkpoint_s=0.0,
            wire_s=0.125,
            pack_s=0.0625,
            digest_s=0.03125,
            other_s=0.25 - 0.21875,
            forward_backward_s=0.375,
            optimizer_s=0.0625,
            votes_s=101.0 - 0.1875 - 100.6875,
            update_s=0.1875,
        ),
    )


def test_the_lines_are_the_lost_time_and_a_median_step() -> None:
    attempt = reconfiguration(source_last_step_ended_s=100.0, first_step_ended_s=101.0)
    steps = [step(4), step(5, started_s=100.3, generation=1, phase="first")]
    steps += [step(n, started_s=95.0 + n, took_s=MEDIAN_S, generation=1) for n in (6, 7, 8)]
    for crossings in (rows(), rows(forward_backward_s=9.0), rows(started_s=98.0), rows()[:1]):
        run = RunRecords(steps, [attempt], [], {}, crossings=crossings)
        (found,) = run_figures(run).reconfigurations
        assert found.path is not None
        assert found.path.lines.sum_s == pytest.approx(found.lost_s + MEDIAN_S)


def test_a_joiner_that_waited_for_the_boundary_waited_for_nothing_of_the_handoff() -> None:
    """It was ready 5 s before; of its waiting only what is left of the time counts."""
    path = path_of(rows(parameter_wire_s=5.125))
    assert path is not None
    assert path.lines.wire_s == 0.25 - 0.0625 - 0.03125
    assert path.lines.other_s == 0.0


def test_what_was_there_before_the_boundary_took_no_time() -> None:
    """It takes its memory over, and computes while others still do their last step."""
    path = path_of(rows(started_s=99.75, forward_backward_s=0.5))
    assert path is not None
    assert (path.lines.wire_s, path.lines.pack_s, path.lines.other_s) == (0.0, 0.0, 0.0)
    assert path.lines.forward_backward_s == 0.25


def test_who_begins_last_is_whom_the_others_wait_for_inside_of_their_forward() -> None:
    path = path_of([*rows(), _crossing(worker=4, started_s=100.5, voted_s=100.6, ended_s=100.9)])
    assert path is not None
    assert (path.last_to_begin, path.last_to_vote) == (4, 1)
    assert path.lines.other_s == 0.5, "it did not say more"
    assert path.lines.forward_backward_s == 0.25


def test_what_was_not_told_is_in_the_remainder() -> None:
    never = {f"parameter_{part}_s": math.nan for part in ("wire", "pack", "digest")}
    path = path_of(rows(**never))
    assert path is not None
    assert (path.lines.wire_s, path.lines.other_s) == (0.0, 0.25)


def test_without_an_end_there_is_no_path() -> None:
    assert path_of([]) is None
    assert path_of(rows(), first_step_ended_s=math.nan) is None
    assert path_of([crossing(ended_s=math.nan)]) is None


def test_in_bounded_memory_a_checkpoint_comes_first_and_all_state_before_the_forward() -> None:
    moved = rows(optimizer_digest_s=0.015625, optimizer_pack_s=0.015625, optimizer_wire_s=4.0)
    path = path_of(moved, checkpointed_s=100.0625)
    assert path is not None
    lines = path.lines
    assert lines.checkpoint_s == 0.0625
    assert (lines.digest_s, lines.pack_s) == (0.046875, 0.078125)
    assert lines.wire_s == 0.25 - 0.0625 - 0.046875 - 0.078125
    assert lines.other_s == 0.0
    assert lines.sum_s == 1.0
