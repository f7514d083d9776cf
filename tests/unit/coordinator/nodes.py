"""Runs of scripted workers on nodes that come and go."""

from __future__ import annotations

from typing import Any

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.run.estimates import Price
from liver_hpc.run.events import Node
from liver_hpc.run.records import ReconfigurationRecord
from tests.unit.coordinator.live import LiveRun, Start

MAIN = (Node("n1", "main", slots=1), Node("n2", "main", slots=1))
SPARE = Node("n5", "spare", slots=2, automatic=False)
POLICY = {"settle_s": 0.02, "retry_s": 0.3}
LONG_S = 600.0


def burst(number: int, slots: int = 1) -> Node:
    return Node(f"burst{number}", f"burst-{number}", slots, preemptible=True, burst=True)


class FixedEstimates:
    """Scripted workers tell invented times: nothing can be learnt from them."""

    measured = True

    def bounded_because(self, source: RankMap, target: RankMap) -> str:
        return ""

    def observe(self, record: ReconfigurationRecord, source: RankMap, target: RankMap) -> None:
        pass

    def observe_step(self, step_s: float, batch: int) -> None:
        pass

    def observe_done(self, steps: int) -> None:
        pass

    def observe_evaluation(self, started_s: float, ended_s: float) -> None:
        pass

    def observe_checkpoint(self, written_bytes: int, seconds: float) -> None:
        pass

    def steps_s(self, source: RankMap, target: RankMap) -> float:
        return 0.0

    def estimate_s(self, source: RankMap, target: RankMap, joiners: int) -> float:
        return 9.0 if joiners else 2.0

    def observe_slowed(self, step_s: float, batch: int) -> None:
        pass

    def observe_aborted(self) -> None:
        pass

    def usual_step_s(self) -> float:
        return 1.0

    def price(self, source: RankMap, target: RankMap, joiners: int) -> Price:
        return Price(ready_s=self.estimate_s(source, target, joiners), cost_s=3.0)

    def checkpoint_s(self, rank_map: RankMap) -> float:
        return 4.0

    def restart_s(self, rank_map: RankMap) -> float:
        return 20.0


def on_two_nodes(make: Start, *more: Node, **sections: Any) -> LiveRun:
    """Two workers on n1 and n2, training."""
    run = make(nodes=(*MAIN, *more), begin=False, **{"policy": POLICY, **sections})
    estimates: Any = run.coordinator.core.elastic.estimates
    estimates.handoffs = FixedEstimates()
    run.start()
    return run


def grown(make: Start, **sections: Any) -> LiveRun:
    """Four workers, two of them on burst nodes."""
    run = on_two_nodes(make, **sections)
    run.cluster.pool.grant(burst(3))
    run.cluster.pool.grant(burst(4))
    assert run.record(0).outcome == "completed"
    return run
