"""A restart's phases, and what the page cache holds."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.baseline import page_cache
from benchmarks.baseline.phases import Restart, RestartTimes, as_if_saved_before

PHASES = ("save_s", "stop_s", "launch_s", "import_s", "groups_s", "load_s", "first_step_s")
RESTART = Restart(
    method="dist_checkpointing",
    source="tp1 pp1 dp2",
    target="tp2 pp1 dp2",
    times=RestartTimes(
        noticed_s=9.5,
        last_step_ended_s=10.0,
        saved_s=14.0,
        stopped_s=14.5,
        aside_s=2.0,
        entered_s=17.0,
        imported_s=21.0,
        built_s=22.0,
        loaded_s=25.0,
        first_step_ended_s=26.0,
    ),
    target_steps_s=(0.25, 0.5, 4.0),
    num_bytes=1000,
    page_cache="dropped",
)


def test_phases_add_up_to_the_total_and_measuring_is_no_phase() -> None:
    record = RESTART.record()
    phases = asdict(record)
    assert sum(phases[name] for name in PHASES) == record.total_s == 14.0
    assert record.launch_s == 0.5
    assert RESTART.reconfiguration_s == 14.5


def test_lost_time_is_the_total_less_the_targets_median_step() -> None:
    assert RESTART.record().lost_s == 13.5


def test_with_a_checkpoint_that_exists_only_the_save_is_gone() -> None:
    record = as_if_saved_before(RESTART.record())
    assert (record.method, record.save_s) == ("dist_checkpointing, exists", 0.0)
    assert (record.total_s, record.lost_s) == (10.0, 9.5)


def test_detail_says_what_the_load_found() -> None:
    assert RESTART.record().detail == "page cache dropped, 1000 bytes"


def test_what_was_just_written_is_in_memory_and_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data").write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    assert page_cache.num_bytes(tmp_path) == 1 << 20
    assert page_cache.resident_share(tmp_path) == 1.0
    said = page_cache.drop(tmp_path)
    share = page_cache.resident_share(tmp_path)
    if said == page_cache.DROPPED:
        assert share < 0.01
    else:  # memory is all that this file system has
        assert said == f"{share:.0%} warm, it could not be dropped"


def test_no_files_are_no_bytes(tmp_path: Path) -> None:
    assert page_cache.resident_share(tmp_path) == 0.0


def test_a_restart_without_later_steps_has_no_median() -> None:
    with pytest.raises(statistics.StatisticsError):
        Restart(**{**RESTART.__dict__, "target_steps_s": ()}).record()
