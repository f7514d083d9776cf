"""What many workers say at once costs the run's core."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FrameType

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.placement import place
from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.events import NodeGone, NodeGranted
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.machine import Run
from tests.fakes import tiny_recipe, tiny_run
from tests.unit.run.begun import of


class CountedWorkers(tuple[int, ...]):
    """Knows how often all of them were gone through."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        CountedWorkers.walks += 1
        return super().__iter__()


def of_many(nodes: int, resumed: bool = False) -> tuple[Run, tuple[int, ...]]:
    """A run on so many nodes of two workers each that trains, or reads a checkpoint."""
    workers = 2 * nodes
    config = tiny_run(
        train={"steps": 100, "global_batch": workers},
        layouts={number: [{"dp": number}] for number in (workers, workers - 2)},
        workers={"initial": workers, "max": workers},
        snapshots={"every_steps": 1},
        cluster={"kind": "slurm"},
    )

    def counted(*given: object) -> RankMap:
        placed = place(*given)  # type: ignore[arg-type]
        return replace(placed, workers=CountedWorkers(placed.workers))

    run = Run(config, tiny_recipe(config).spec, place=counted)
    at = e.Resumed("/checkpoints/step-5", 5, 3, f"tp1 pp1 dp{workers}") if resumed else None
    run.handle(e.CoordinatorStarted({}, "/checkpoints", at), 1.0)
    for number in range(nodes):
        run.handle(NodeGranted(e.Node(f"n{number}", "main", 2)), 1.0)
    (launch,) = of(a.Launch, run.handle(e.LaunchAllowed(), 1.0))
    for each in launch.agents:  # type: ignore[attr-defined]
        (admit,) = of(a.Admit, run.handle(e.AgentMet(each.agent, 2), 1.0))
        for worker in admit.workers:  # type: ignore[attr-defined]
            run.handle(m.Hello(worker=worker, pid=1, host="h", booted_s=1.0), 1.0)
    assert run.world is not None
    return run, run.world.rank_map.workers


def calls_of_each(run: Run, said: Iterable[e.Event]) -> set[int]:
    """How many functions are called for one of the messages, as the numbers differ."""
    found, calls = set(), 0

    def count(_frame: FrameType, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    for each in said:
        calls = 0
        sys.setprofile(count)
        try:
            run.handle(each, 3.0)
        finally:
            sys.setprofile(before)
        found.add(calls)
    return found


DIGEST = m.ClassDigest(kind="main", tp_replicated=True, multi_stage=False, value="0" * 16)
SAVED = m.ScalarState(step=5, consumed_samples=40, optimizer_step=5, loss_scale=1.0, seed=1)


def calls_in_a_recovery(nodes: int) -> tuple[set[int], set[int]]:
    """For what survivors say that have let go, and that have filled the next world; but for the
    last of each."""
    run, workers = of_many(nodes)
    generation, layout = run.world.generation, str(run.world.rank_map.layout)  # type: ignore[union-attr]
    run.handle(NodeGone("n0", "its power failed"), 2.0)
    left = [worker for worker in workers if run.recoveries.involves(worker)]
    assert len(left) == len(workers) - 2

    def halted(worker: int) -> m.Halted:
        about = {"generation": generation, "layout": layout, "scalars": SAVED, "digests": {}}
        ranks = (workers.index(worker), workers.index(worker) - 2)
        held = tuple(m.HeldSnapshot(rank=rank % len(workers), **about) for rank in ranks)
        return m.Halted(worker=worker, generation=generation, held=held)

    *others, last = map(halted, left)
    let_go = calls_of_each(run, others)
    (refill,) = [
        each.message  # type: ignore[attr-defined]
        for each in of(a.Send, run.handle(last, 3.0))
        if isinstance(each.message, m.Refill)  # type: ignore[attr-defined]
    ]
    *filled, last_filled = (
        m.Refilled(worker=worker, generation=refill.generation, scalars=SAVED, digests=(DIGEST,))
        for worker in left
    )
    CountedWorkers.walks = 0
    fill = calls_of_each(run, filled)
    assert CountedWorkers.walks == 0, "all workers were gone through for one message"
    assert run.state is RunState.RECOVERING
    run.handle(last_filled, 3.0)
    assert CountedWorkers.walks > 0, "nothing was counted"
    assert run.state is RunState.TRAINING
    return let_go, fill


def test_what_one_of_many_says_in_a_recovery_costs_the_same_with_more_of_them() -> None:
    assert calls_in_a_recovery(4) == calls_in_a_recovery(16)


def test_so_does_what_one_says_that_has_read_its_checkpoint() -> None:
    def calls(nodes: int) -> set[int]:
        run, workers = of_many(nodes, resumed=True)
        about = {"generation": run.world.generation, "scalars": SAVED, "digests": ()}  # type: ignore[union-attr]
        return calls_of_each(run, (m.Restored(worker=each, **about) for each in workers))

    assert calls(4) == calls(16)
