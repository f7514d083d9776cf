"""What a start of a run is told of the one before it, against what the disk says."""

from __future__ import annotations

import pytest

from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.events import Memory, Node
from tests.fakes import tiny_recipe, tiny_run
from tests.unit.checkpoint.disk import Disk
from tests.unit.coordinator.live import LiveRun, Start

pytestmark = pytest.mark.timeout(60)

NODES = tuple(Node(f"n{number}", "main", slots=1) for number in range(1, 5))
ASKS_FOR_FOUR = [{"at_step": 3, "workers": 4}]


def after_step_20(make: Start, memory: Memory | None) -> LiveRun:
    """A run that has its first workers launched, to go on from a checkpoint."""
    run = make(begin=False, nodes=NODES, notices=ASKS_FOR_FOUR)
    Disk(tiny_recipe(tiny_run()).spec, run.directory).save(Layout(1, 1, 2), 20)
    if memory is not None:
        run.coordinator._before = memory
    run.start_only()
    run.until(lambda: run.status()["last_event"].startswith("reading "), "the workers")
    return run


def nodes_of(run: LiveRun) -> list[str]:
    return sorted(request.seat.node for request in run.cluster.launched)


def test_without_memory_the_run_file_is_the_bound(make: Start) -> None:
    run = after_step_20(make, None)
    assert run.coordinator.core.memory.ceiling == 4
    assert run.coordinator.core.memory.drained == ()
    assert nodes_of(run) == ["n1", "n2", "n3", "n4"]


def test_what_an_operator_asked_for_later_beats_the_run_file(make: Start) -> None:
    memory = Memory(7, 2, ("n2", "n9"), agents=5)
    run = after_step_20(make, memory)
    agents = [request.agent for request in run.cluster.launched]
    assert agents == ["a5", "a6"], "one of those before may live still"
    left = Memory(9, 2, ("n2", "n9"), agents=7)  # 8 may have been rebuilt
    assert run.coordinator.core.memory == left
    assert nodes_of(run) == ["n1", "n3"]
    assert sorted(run.cluster.pool.avoided) == ["n2", "n9"]
