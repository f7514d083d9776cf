"""A worker's part in filling a world after a loss: until when it keeps its connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.clock import SystemClock
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.worker import holder
from liver_hpc.worker.holder import LeftWorld, WorldHolder
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Device
from tests.unit.config.runs import minimal

GENERATION, WORKER = 4, 1
SCALARS = m.ScalarState(step=3, consumed_samples=24, optimizer_step=3, loss_scale=1.0, seed=1)


class Filling:
    """In the place of `Refilling`: nothing crosses."""

    def __init__(self, _context: WorkerContext, message: m.Refill) -> None:
        self.generation, self.closed = message.generation, False

    def run(self, _world: Any, _held: Any) -> m.Refilled:
        return m.Refilled(worker=WORKER, generation=self.generation, scalars=SCALARS)

    def close(self) -> None:
        self.closed = True


class Holder(WorldHolder):
    """Its worlds are nothing, its thread is the test's second one."""

    def __init__(self) -> None:
        unused: Any = None
        self.said = threading.Event()
        context = WorkerContext(
            checkpoints=Path("checkpoints"),
            worker=WORKER,
            config=minimal(),
            recipe=SimpleNamespace(spec=None),  # type: ignore[arg-type]
            device=Device(torch.device("cpu")),
            network=unused,
            clock=SystemClock(),
            send=lambda _message: self.said.set(),
            open_store=unused,
        )
        super().__init__(context)
        self.outcome: BaseException | None = None

    def _build(self, rank_map: RankMap, generation: int, kept: Any = None) -> Any:
        return SimpleNamespace(rank_map=rank_map, generation=generation, state=None)

    def refill_beside(self, message: m.Refill) -> threading.Thread:
        def refill() -> None:
            try:
                self.refill(message)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.outcome = error

        thread = threading.Thread(target=refill, daemon=True)
        thread.start()
        assert self.said.wait(10)
        return thread


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(holder, "Refilling", Filling)
    one = Holder()
    yield one
    one.proceed.set()


def refill_of(*seats: int) -> m.Refill:
    """Workers 0 and 1 have snapshots."""
    rank_map = RankMap(Layout(1, 1, len(seats)), seats)
    return m.Refill(
        generation=GENERATION,
        rank_map=m.WireRankMap.of(rank_map),
        saved_generation=0,
        saved="tp1 pp1 dp2",
        holders=(0, WORKER),
        scalars=SCALARS,
        known=3,
    )


@pytest.mark.parametrize("seats", [(0, WORKER), (0,)], ids=["with a seat", "without"])
def test_connections_stay_until_all_workers_hold_what_they_should(
    keeper: Holder, seats: tuple[int, ...]
) -> None:
    thread = keeper.refill_beside(refill_of(*seats))
    filling: Any = keeper._refilling
    thread.join(0.2)
    assert thread.is_alive()
    assert not filling.closed
    keeper.proceed.set()
    thread.join(10)
    assert filling.closed
    assert keeper._refilling is None
    if WORKER in seats:
        assert keeper.outcome is None
    else:
        assert isinstance(keeper.outcome, LeftWorld)
        assert keeper.outcome.generation == GENERATION
