"""Which nodes were held and who sat there, from the events of a journal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from liver_hpc.report.holdings import HoldingsFold, partitions_of
from liver_hpc.run.records import HoldingRecord, PlacementRecord
from tests.unit.tracking.told import entries

CONFIG = """
cluster:
  slurm:
    components: [{name: main, partition: gpu}, {name: extra, partition: null}]
    burst: {partition: preempt}
"""
STARTED = {"type": "coordinator_started", "attributes": {"config": CONFIG}}
ALLOWED = {"type": "launch_allowed"}


def granted(name: str, allocation: str = "main", slots: int | None = 4) -> dict[str, Any]:
    node = {"name": name, "allocation": allocation, "slots": slots}
    return {"type": "node_granted", "node": node}


def gone(name: str) -> dict[str, Any]:
    return {"type": "node_gone", "node": name, "reason": "given back"}


def launched(agent: str, node: str, workers: int) -> dict[str, Any]:
    seat = {"node": node, "slots": [*range(workers)]}
    return {"type": "launch", "agents": [{"agent": agent, "seat": seat, "layout": {}}]}


def admitted(agent: str, *workers: int) -> dict[str, Any]:
    return {"type": "admit", "agent": agent, "workers": [*workers]}


def begun(generation: int, *workers: int) -> dict[str, Any]:
    rank_map = {"tp": 1, "pp": 1, "dp": len(workers), "workers": [*workers]}
    message = {"type": "begin", "generation": generation, "rank_map": rank_map}
    return {"type": "send", "workers": [*workers], "message": message}


def ended(state: str) -> dict[str, Any]:
    return {"type": "end", "state": state, "reason": "", "step": 1}


def fold_of(*events: Any) -> HoldingsFold:
    """The entry of each event is a second later than that of the one before, from 1000."""
    fold = HoldingsFold()
    for entry in entries(*events):
        fold.take(entry)
    return fold


def spans(fold: HoldingsFold) -> list[tuple[str, float, float]]:
    return [(row.node, row.granted_s, row.returned_s) for row in fold.records]


def test_a_node_is_held_from_its_grant_until_it_is_gone() -> None:
    fold = fold_of(STARTED, granted("n1"), granted("n2", "burst-17", 2), gone("n1"))
    assert fold.records[0] == HoldingRecord("n1", "main", "gpu", 4, 1001.0, 1003.0)
    second = fold.records[1]
    assert (second.partition, second.slots) == ("preempt", 2)
    assert math.isnan(second.returned_s)
    assert fold.nodes == 1


def test_a_run_of_many_worlds_keeps_the_newest_rank_maps() -> None:
    worlds = (({"type": "any"}, [begun(generation, 0, 1)]) for generation in range(40))
    fold = fold_of(STARTED, *worlds)
    assert 39 in fold.rank_maps
    assert len(fold.rank_maps) < 10
    assert len(fold.placements) == 40


def test_the_end_of_a_run_gives_all_back() -> None:
    fold = fold_of(STARTED, granted("n1"), ({"type": "finished"}, [ended("finished")]))
    assert spans(fold) == [("n1", 1001.0, 1002.0)]


def test_a_restart_within_the_job_keeps_what_is_granted_again() -> None:
    end = ({"type": "broken"}, [ended("restart")])
    fold = fold_of(STARTED, granted("n1"), granted("n2"), end, STARTED, granted("n1"), ALLOWED)
    assert spans(fold)[0] == ("n2", 1002.0, 1005.0)  # the last time that anything was known
    node, from_s, to_s = spans(fold)[1]
    assert (node, from_s) == ("n1", 1001.0)
    assert math.isnan(to_s)


@pytest.mark.parametrize("begins", [True, False])
def test_a_restart_that_another_coordinator_makes_comes_after_a_time_without_nodes(
    begins: bool,
) -> None:
    """A job that died as it was to restart, or whose code could not be read for it any more; it is
    resumed the next day, or cannot be."""
    first, second = STARTED | {"epoch": 1}, STARTED | {"epoch": 3}
    end, failed = [({"type": "broken"}, [ended(each)]) for each in ("restart", "failed")]
    events = [first, granted("n1"), {"type": "took_over", "epoch": 2}, end]
    later = [second, granted("n1"), ALLOWED] if begins else [failed]
    fold = HoldingsFold()
    for entry in entries(*events, *later):
        day = entry.number // len(events)
        fold.take(entry._replace(at_s=entry.at_s + 80_000.0 * day))
    assert spans(fold)[0] == ("n1", 1001.0, 1003.0)
    assert [from_s for _, from_s, _ in spans(fold)[1:]] == [81_005.0] * begins

    fold = fold_of(*events, STARTED | {"epoch": 2}, granted("n1"), ALLOWED)
    assert [from_s for _, from_s, _ in spans(fold)] == [1001.0], "it restarts by itself"


def test_a_start_after_a_sudden_end_holds_what_it_is_granted() -> None:
    fold = fold_of(STARTED, granted("n1"), ALLOWED, STARTED, granted("n1"))
    assert spans(fold)[0] == ("n1", 1001.0, 1002.0)
    assert spans(fold)[1][1] == 1004.0


def test_a_machine_without_a_number_of_slots_is_held_by_its_workers() -> None:
    fold = fold_of(
        STARTED,
        granted("", "machine", None),
        (ALLOWED, [launched("a", "", 2)]),
        ({"type": "agent_met"}, [admitted("a", 0, 1)]),
        {"type": "worker_gone", "worker": 1, "reason": ""},
        {"type": "agent_ended", "agent": "a", "exit_code": 0},
    )
    assert spans(fold) == [("", 1002.0, 1004.0), ("", 1002.0, 1005.0)]
    assert [row.slots for row in fold.records] == [1, 1]


def test_a_world_is_placed_where_its_workers_are() -> None:
    fold = fold_of(
        STARTED,
        granted("n1"),
        granted("n2"),
        (ALLOWED, [launched("a", "n1", 2), launched("b", "n2", 1)]),
        ({"type": "agent_met"}, [admitted("a", 0, 1)]),
        ({"type": "agent_met"}, [admitted("b", 2), begun(0, 2, 0, 1)]),
    )
    assert fold.placements == [
        PlacementRecord(0, "tp1 pp1 dp3", "n1", 2),
        PlacementRecord(0, "tp1 pp1 dp3", "n2", 1),
    ]
    assert (fold.workers_of(0), fold.workers_of(1)) == (3, 0)


def prepared(generation: int, source: int, *workers: int) -> dict[str, Any]:
    rank_map = {"tp": 1, "pp": 1, "dp": len(workers), "workers": [*workers]}
    message = {"type": "prepare", "generation": generation, "source_generation": source}
    return {"type": "send", "workers": [*workers], "message": {**message, "target": rank_map}}


def test_what_a_step_decides_counts_and_a_world_that_is_built_anew_is_where_its_source_was() -> (
    None
):
    resumed = {"type": "resume", "generation": 1, "rebuild_generation": 2}
    fold = fold_of(
        STARTED,
        granted("", "machine", None),
        (ALLOWED, [launched("a", "", 2)]),
        ({"type": "agent_met"}, [admitted("a", 0, 1), begun(0, 0, 1)]),
        ({"type": "step_done"}, [launched("b", "", 1)]),
        ({"type": "agent_met"}, [admitted("b", 2)]),
        ({"type": "step_done"}, [prepared(1, 0, 0, 1, 2)]),
        ({"type": "aborted"}, [{"type": "send", "workers": [0, 1], "message": resumed}]),
    )
    assert [fold.workers_of(generation) for generation in range(4)] == [2, 3, 2, 0]
    assert len(fold.records) == 3, "a slot for each worker"


@pytest.mark.parametrize("text", ["", "a: [", "name: x", "cluster: {slurm: {components: 3}}"])
def test_what_is_no_run_file_names_no_partition(text: str) -> None:
    assert partitions_of(text) == {}
