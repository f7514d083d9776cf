"""A restart's phases."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.baseline.methods import num_bytes
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
        entered_s=15.0,
        imported_s=19.0,
        built_s=20.0,
        loaded_s=23.0,
        first_step_ended_s=24.0,
    ),
    target_steps_s=(0.25, 0.5, 4.0),
    num_bytes=1000,
)


def test_phases_add_up_to_the_total() -> None:
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


def test_the_length_of_a_checkpoint_is_that_of_all_its_files(tmp_path: Path) -> None:
    assert num_bytes(tmp_path) == 0
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data").write_bytes(bytes(1 << 10))
    (tmp_path / "more").write_bytes(b"x")
    assert num_bytes(tmp_path) == (1 << 10) + 1


def test_a_restart_without_later_steps_has_no_median() -> None:
    with pytest.raises(statistics.StatisticsError):
        Restart(**{**RESTART.__dict__, "target_steps_s": ()}).record()
