"""Where a run stands, by entries of its journal."""

from __future__ import annotations

from typing import Any

from liver_hpc.dashboard.standing import Standing
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.messages import WireRankMap
from liver_hpc.report.holdings import HoldingsFold
from liver_hpc.run.entries import Entry

STARTED = {"type": "coordinator_started", "attributes": {"name": "demo"}}


def test_a_start_that_ended_suddenly_ended_when_it_was_heard_of_last() -> None:
    """Not when the next one began, hours later."""
    rank_map = WireRankMap.of(RankMap(Layout.parse("dp1"), (0,))).model_dump()
    begin = {"type": "begin", "generation": 0, "rank_map": rank_map, "checkpoint": None}
    seat = {"agent": "a", "seat": {"node": "n1", "slots": [0]}}
    decided: list[dict[str, Any]] = [
        {"type": "launch", "agents": [seat]},
        {"type": "admit", "agent": "a", "workers": [0]},
        {"type": "send", "workers": [0], "message": begin},
    ]
    granted = {"type": "node_granted", "node": {"name": "n1", "allocation": "main", "slots": 1}}
    entries = [
        Entry(0, 1000.0, STARTED, []),
        Entry(1, 1010.0, granted, []),
        Entry(2, 1020.0, {"type": "launch_allowed"}, decided),
        Entry(3, 1100.0, {"type": "step_done", "worker": 0, "generation": 0, "step": 0}, []),
        Entry(4, 36000.0, STARTED, []),
    ]
    held = HoldingsFold()
    standing = Standing(held)
    for entry in entries:
        held.take(entry)
        standing.take(entry)
    node = standing.nodes["n1"]
    assert [(span.from_s, span.until_s) for span in node.held] == [(1010.0, 1100.0)]
    assert [(span.from_s, span.until_s) for span in node.used] == [(1020.0, 1100.0)]
    assert [(world.from_s, world.until_s) for world in standing.worlds] == [(1020.0, 1100.0)]
    assert standing.last_s == 36000.0
