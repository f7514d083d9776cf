"""Nodes come and are to be left again faster than a run can follow; it ends up where it should."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run.events import Node
from tests.integration.elastic import losses
from tests.integration.nodes import on_nodes, workers_of
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)
from tests.scripted_cluster import ScriptedPool

pytestmark = pytest.mark.timeout(300)

SEED = 15
NOTICES, STORM_S = 50, 40.0
LASTS, COME_AND_GO = "n1", ("n2", "n3", "n4")
LAYOUTS = {1: [{"dp": 1}], 2: [{"tp": 2}], 3: [{"dp": 3}], 4: [{"tp": 2, "dp": 2}]}


def storm(pool: ScriptedPool, chance: Random) -> set[str]:
    """Notices at random moments, the last one a warning; the nodes that may be used after it."""
    usable = {LASTS, COME_AND_GO[0]}
    moments = sorted(chance.uniform(0.0, STORM_S) for _ in range(NOTICES))
    begun_s = time.monotonic()
    for number, moment_s in enumerate(moments, start=1):
        time.sleep(max(0.0, begun_s + moment_s - time.monotonic()))
        may_go = sorted(usable - {LASTS})
        node = chance.choice(may_go if number == NOTICES and may_go else COME_AND_GO)
        if node in usable:
            usable.remove(node)
            pool.warn(node, "preempted", window_s=60.0)
        else:  # it comes, or its warning is lifted
            usable.add(node)
            pool.grant(Node(node, "main", slots=1))
    return usable


@pytest.mark.long
def test_fifty_notices_within_a_minute_end_in_the_layout_that_the_nodes_left_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is lost or done twice, no worker is lost, and none stays where it is to leave."""
    monkeypatch.setenv("LIVER_TEST_STEP_S", "0.1")
    config = run_config(
        tmp_path, ENDLESS, layouts=LAYOUTS, policy={"settle_s": 0.5, "retry_s": 1.0}
    )
    run, pool, coordinator = on_nodes(config, n1=1, n2=1)
    watch(run, lambda status: status.step >= 1, 60.0)
    usable = storm(pool, Random(SEED))

    def converged(status: StatusSnapshot) -> bool:
        settled = status.handoff is None and not status.queued and not status.spares
        free = {line.partition(" ")[0] for line in status.nodes if ": 1 of 1 slots taken" in line}
        return settled and free == usable and len(status.workers) == len(usable)

    watch(run, converged, 90.0)
    left = {node for node in COME_AND_GO if node not in usable}
    wait_until(lambda: left <= {*pool.given_back}, 20.0, f"{left} to be given back")
    wait_until(lambda: len(workers_of(run)) == len(usable), 20.0, "the workers that left to end")

    records = stop_and_read(run)
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    fixed = run_config(tmp_path, len(records.steps), layouts=LAYOUTS)
    assert worst_difference(losses(records), losses(finish(start(fixed)))) <= 1e-4
    assert not records.recoveries
    done = [each for each in records.reconfigurations if each.outcome == "completed"]
    assert done
    assert all(each.digest_equal for each in done)
    assert not [each for each in records.reconfigurations if each.outcome == "failed"]
    assert not [each for each in records.notices if each.outcome in ("lost", "late")]
    coordinator.join(20.0)
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")
