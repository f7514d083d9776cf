"""What the coordinator records goes through the journal, over all restarts of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.journal_metrics import JournalMetrics
from liver_hpc.errors import LiverError
from liver_hpc.report.hdf5 import read_hdf5, write_hdf5
from liver_hpc.report.store import read_run
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import reconfiguration, step
from tests.unit.report.run_of_everything import everything


def metrics(directory: Path, host: str = "n1") -> JournalMetrics:
    return JournalMetrics(directory, 0, {"host": host}, FakeClock())


def test_all_that_is_recorded_is_read_and_is_in_the_metrics_file_at_the_end(tmp_path: Path) -> None:
    records, ours = everything(), metrics(tmp_path)
    for each in records.steps:
        ours.add_step(each)
    for attempt in records.reconfigurations:
        ours.add_reconfiguration(attempt)
    for notice in records.notices:
        ours.add_notice(notice)
    for phase in records.worker_phases:
        ours.add_worker_phase(phase)
    for traffic in records.traffic:
        ours.add_traffic(traffic)
    ours.close()
    wanted = RunRecords(
        records.steps,
        records.reconfigurations,
        [],
        {"host": "n1"},
        records.notices,
        [],
        records.worker_phases,
        records.traffic,
    )
    assert repr(read_run(tmp_path)) == repr(read_hdf5(tmp_path / "metrics.h5")) == repr(wanted)
    with pytest.raises(LiverError, match="too late"):
        ours.add_step(step(1))


def test_a_later_coordinator_knows_the_generations_and_keeps_the_records(tmp_path: Path) -> None:
    known = []
    for number in range(3):
        ours = metrics(tmp_path, f"n{number}")
        known.append(ours.last_generation)
        ours.add_step(step(number, generation=2 * number, loss=math.nan))
        ours.add_reconfiguration(reconfiguration(generation=2 * number + 1))
        ours.close()
    assert known == [-1, 1, 3]
    records = read_run(tmp_path)
    assert [row.step for row in records.steps] == [0, 1, 2]
    assert [row.generation for row in records.reconfigurations] == [1, 3, 5]
    assert records.attributes == {"host": "n2"}


def test_what_an_earlier_release_recorded_is_kept_under_another_name(tmp_path: Path) -> None:
    earlier = RunRecords([step(0, generation=4)], [], [], {})
    write_hdf5(tmp_path / "metrics.h5", earlier)
    ours = metrics(tmp_path)
    ours.add_step(step(1))
    ours.close()
    assert ours.last_generation == 4
    assert read_hdf5(tmp_path / "metrics.1.h5").steps == earlier.steps
    assert read_hdf5(tmp_path / "metrics.h5").steps == [step(1)]
