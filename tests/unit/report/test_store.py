"""What was recorded of a run: out of its journal, or of the metrics file where there is none."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.events import Requested, WorldRef
from liver_hpc.report.derive import run_figures
from liver_hpc.report.hdf5 import read_hdf5, write_hdf5
from liver_hpc.report.store import read_run, write_metrics
from liver_hpc.run.actions import AttemptBegins
from liver_hpc.run.codec import encode as code
from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.events import NodeWarned
from liver_hpc.run.records import RunRecords
from tests.unit.report.journals import write_journal
from tests.unit.report.rows import step
from tests.unit.report.run_of_everything import everything


def test_all_records_are_read_from_the_journal(tmp_path: Path) -> None:
    write_journal(tmp_path, everything())
    assert repr(read_run(tmp_path)) == repr(everything())


def test_a_number_that_is_not_finite_comes_back_as_one(tmp_path: Path) -> None:
    steps = [step(0, loss=math.nan, grad_norm=math.inf), step(1, loss=-math.inf)]
    write_journal(tmp_path, RunRecords(steps, [], [], {}))
    assert repr(read_run(tmp_path).steps) == repr(steps)


def test_where_there_is_no_journal_the_metrics_file_is_read(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "metrics.h5", RunRecords([step(7)], [], [], {}))
    assert read_run(tmp_path).steps == [step(7)]
    write_journal(tmp_path, RunRecords([step(8)], [], [], {}))
    assert read_run(tmp_path).steps == [step(8)]


def test_a_run_of_which_nothing_was_recorded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was recorded yet"):
        read_run(tmp_path)
    (tmp_path / JOURNAL_FILE).touch()
    assert read_run(tmp_path) == RunRecords([], [], [], {})


def test_attributes_are_those_of_the_newest_coordinator(tmp_path: Path) -> None:
    lines = [
        encode(n, 1.0, {"type": "coordinator_started", "attributes": {"host": host}})
        for n, host in enumerate(["n1", "n2"])
    ]
    (tmp_path / JOURNAL_FILE).write_bytes(b"".join(lines))
    assert read_run(tmp_path).attributes == {"host": "n2"}


def test_what_a_killed_coordinator_left_open_is_recorded_by_the_next_start(tmp_path: Path) -> None:
    """Its node is warned; it is killed with its job in the handoff, and begins again from disk."""
    source = WorldRef(0, RankMap(Layout(1, 1, 2), (0, 1)))
    requested = Requested(1, source, RankMap(Layout(1, 1, 1), (0,)), "leaving n2: preempted")
    start: dict[str, Any] = {"type": "coordinator_started", "attributes": {}, "epoch": 1}
    node = {"name": "n2", "allocation": "burst-7", "slots": 1}
    slow = {"worker": 0, **asdict(step(1, started_s=102.0, took_s=3.0))}
    events: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (start, []),
        ({"type": "node_granted", "node": node}, []),
        ({"type": "step_done", "worker": 0, **asdict(step(0, took_s=2.0))}, []),
        (
            code(NodeWarned("n2", "preempted", 102.0, 132.0)),
            [code(AttemptBegins(requested, 102.0))],
        ),
        ({"type": "step_done", **slow}, [{"type": "step_phase", "phase": "prepare"}]),
    ]
    path = tmp_path / JOURNAL_FILE
    lines = [encode(n, 100.0 + n, event, did) for n, (event, did) in enumerate(events)]
    path.write_bytes(b"".join(lines))
    assert read_run(tmp_path).reconfigurations == [], "it may be going on"
    lines.append(encode(5, 200.0, start | {"epoch": 3}, []))
    path.write_bytes(b"".join(lines))
    run = read_run(tmp_path)
    (notice,) = run.notices
    assert (notice.kind, notice.node, notice.allocation) == ("preempted", "n2", "burst-7")
    assert (notice.at_s, notice.deadline_s, notice.outcome) == (102.0, 132.0, "open")
    figures = run_figures(run)
    (attempt,) = figures.reconfigurations
    assert (attempt.generation, attempt.outcome, attempt.step) == (1, "failed", 2)
    assert attempt.cost_s == attempt.slowdown_s == pytest.approx(1.0)
    assert figures.failed == 1


def test_a_journal_of_a_later_release_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    """Events, actions, tables and fields of which this release knows nothing are left out."""
    row = {"generation": 3, "sender": 0, "receiver": 1, "bytes": 12, "colour": "red"}
    actions = [
        {"type": "record", "table": "traffic", "row": row},
        {"type": "record", "table": "weather", "row": {"rain": True}},
        {"type": "paint"},
    ]
    done = {"type": "step_done", **{f: getattr(step(1), f) for f in step(1).__slots__}, "new": 1}
    lines = [encode(0, 1.0, {"type": "painted"}, actions), encode(1, 1.0, done)]
    (tmp_path / JOURNAL_FILE).write_bytes(b"".join(lines))
    records = read_run(tmp_path)
    assert [traffic.bytes for traffic in records.traffic] == [12]
    assert records.steps == [step(1)]


def test_a_record_that_lacks_a_field_is_told_with_its_entry(tmp_path: Path) -> None:
    row = {"type": "record", "table": "traffic", "row": {"generation": 3}}
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(encode(0, 1.0, {"type": "any"}, [row]))
    with pytest.raises(ConfigError, match=r"journal\.jsonl, entry 0: .*'sender'.*another version"):
        read_run(tmp_path)
    path.write_bytes(encode(0, 1.0, {"type": "step_done", "step": 1}))
    with pytest.raises(ConfigError, match="entry 0: 'generation'; another version"):
        read_run(tmp_path)


def test_the_metrics_file_is_made_of_the_journal(tmp_path: Path) -> None:
    write_journal(tmp_path, everything())
    write_metrics(tmp_path)
    assert repr(read_hdf5(tmp_path / "metrics.h5")) == repr(everything())
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL_FILE, "metrics.h5"}


def test_a_metrics_file_that_cannot_be_made_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_metrics(tmp_path)
    assert "journal.jsonl cannot be read: No such file" in caplog.text
    write_journal(tmp_path, everything())
    (tmp_path / "metrics.h5").mkdir()
    write_metrics(tmp_path)
    assert "metrics.h5 cannot be written: Is a directory" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL_FILE, "metrics.h5"}
