"""What workers say of their collectives' transports becomes one row a world and transport."""

from __future__ import annotations

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import Requested, WorldRef
from liver_hpc.protocol.messages import Transports
from liver_hpc.run.actions import AttemptBegins, Record, RecordAll
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.records import NetworkRecord

Rows = list[NetworkRecord]
DP2 = Layout(1, 1, 2)


def told(worker: int, host: str, *kinds: str, generation: int = 0, workers: int = 2) -> Transports:
    return Transports(
        worker=worker,
        generation=generation,
        workers=workers,
        host=host,
        kinds=kinds,
        detail=f"way of {host}",
    )


@pytest.fixture
def rows() -> Rows:
    return []


@pytest.fixture
def recorder(rows: Rows) -> RunRecorder:
    def add(what: Record | RecordAll | AttemptBegins) -> None:
        if isinstance(what, Record) and isinstance(what.row, NetworkRecord):
            rows.append(what.row)

    return RunRecorder(add, FakeClock())


def test_a_world_is_recorded_once_all_its_workers_have_said_what_they_use(
    recorder: RunRecorder, rows: Rows
) -> None:
    recorder.connected(told(1, "n2", "NET/IB"))
    assert rows == []
    assert 0 not in recorder.transports
    recorder.connected(told(0, "n1", "NET/IB", "SHM"))
    assert rows == [
        NetworkRecord(0, "NET/IB", "n1,n2", "n1: way of n1 | n2: way of n2"),
        NetworkRecord(0, "SHM", "n1", "n1: way of n1"),
    ]
    assert recorder.transports == {0: ("NET/IB", "SHM")}


def test_worlds_that_connect_side_by_side_are_kept_apart(recorder: RunRecorder, rows: Rows) -> None:
    recorder.connected(told(0, "n1", "gloo tcp", generation=1))
    recorder.connected(told(0, "n1", "NET/Socket", generation=2))
    recorder.connected(told(1, "n1", "gloo tcp", generation=1))
    assert [record.generation for record in rows] == [1]


def test_a_world_that_comes_to_nothing_is_forgotten(recorder: RunRecorder, rows: Rows) -> None:
    source, target = WorldRef(0, RankMap(DP2, (0, 1))), RankMap(DP2, (2, 3))
    recorder.attempt_begins(Requested(1, source, target, "test"), 0.0)
    recorder.connected(told(2, "n1", "gloo tcp", generation=1))
    recorder.attempt_ended(Ended(1, "aborted", "", source))
    recorder.connected(told(3, "n1", "gloo tcp", generation=1))
    assert rows == []


def test_a_world_of_one_uses_none(recorder: RunRecorder, rows: Rows) -> None:
    recorder.connected(told(0, "n1", workers=1))
    assert rows == []
    assert recorder.transports == {0: ()}
