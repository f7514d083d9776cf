"""Workers that keep snapshots, all in one process: their worlds are tensors, and a share crosses to
the partner when the test says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import SnapshotSection
from liver_hpc.errors import TransferError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.snapshots import partners
from liver_hpc.protocol.messages import Unprotected
from liver_hpc.snapshot import keeping
from liver_hpc.snapshot.keeping import Snapshots
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.world.device import Device
from liver_hpc.world.steps import Flags, StepResult
from tests.unit.layout.models import TIED
from tests.unit.snapshot.states import CPU, SCALARS, filled

AnyKeeper = TypeVar("AnyKeeper", bound="Keeper")

LIMIT_S = 10.0
PAIR = RankMap(Layout(1, 1, 2), (4, 5))
TRIO = RankMap(Layout(1, 1, 3), (4, 5, 6))
ALONE = RankMap(Layout(1, 1, 1), (4,))


class PlayedExchange:
    """In the place of `Exchange`. sent: the steps of what was handed over, each with the digest of
    its memory. begun: something was. crosses: set by the test, for one time. fails: with this, from
    then on. used_s: CPU seconds that each takes on the way."""

    made: list[PlayedExchange]
    shares: dict[tuple[int, int, int], Any]
    connected = True
    used_s = 0.0

    def __init__(self, rank_map: RankMap, worker: int, generation: int, step: int) -> None:
        self.rank = rank_map.workers.index(worker)
        of_rank = partners(rank_map)
        self.partner = of_rank[self.rank]
        self.wards = tuple(rank for rank, partner in enumerate(of_rank) if partner == worker)
        self.sent: list[tuple[int, dict[str, int]]] = []
        self.begun = threading.Event()
        self.crosses = threading.Event()
        self.fails = ""
        self._generation = generation
        self.made.append(self)

    def swap(self, own: Snapshot, wards: Sequence[Snapshot], deadline: Deadline) -> None:
        assert own.scalars is not None
        step = own.scalars.step
        self.sent.append((step, own.digest()))
        self.shares[self._generation, step, self.rank] = own
        self.begun.set()
        assert self.crosses.wait(LIMIT_S), "the test has forgotten it"
        self.crosses.clear()
        if self.fails:
            raise TransferError(self.fails)
        for rank, ward in zip(self.wards, wards, strict=True):
            theirs = self.shares[self._generation, step, rank]
            for chunk, their_chunk in zip(ward.chunks, theirs.chunks, strict=True):
                chunk.copy_(their_chunk)
            ward.scalars, ward.digests = theirs.scalars, theirs.digests

    def cpu_s(self) -> float:
        return self.used_s * len(self.sent)

    def close(self) -> None:
        self.fails = "closed"
        self.crosses.set()


class Keeper:
    """One worker: what it keeps, and the world of plain tensors that it trains."""

    def __init__(
        self,
        worker: int,
        every_steps: Any,
        cost: float = 1.0,
        device: Device | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.worker = worker
        self.said: list[Unprotected] = []
        self.step = 0
        self.world: Any = None
        section = SnapshotSection(every_steps=every_steps, cost=cost)
        context: Any = SimpleNamespace(
            worker=worker,
            config=SimpleNamespace(
                snapshots=section,
                deadlines=SimpleNamespace(collective_s=limit_s, heartbeat_s=limit_s),
            ),
            recipe=SimpleNamespace(spec=TIED),
            device=device or Device(CPU),
            clock=SystemClock(),
            send=self.said.append,
        )
        self.snapshots = Snapshots(context)

    def enter(self, rank_map: RankMap, generation: int) -> None:
        """Another world trains from now on."""
        layout = rank_map.layout
        at = layout.coordinate(rank_map.workers.index(self.worker))
        state = filled(TIED, layout, at, torch.float32)
        self.world = SimpleNamespace(
            rank_map=rank_map,
            generation=generation,
            state=state,
            renew_untrained=lambda: None,
            scalar_state=lambda step: SCALARS.model_copy(update={"step": step}),
            views=[state.view(kind, *owned) for kind in TIED.kinds for owned in state.boxes(kind)],
        )

    @property
    def exchange(self) -> PlayedExchange:
        """That of the world that trains."""
        taking = self.snapshots._taking
        assert taking is not None
        played: Any = taking._exchange
        return played  # type: ignore[no-any-return]

    @property
    def steps_sent(self) -> list[int]:
        """Of all worlds."""
        return [step for each in PlayedExchange.made for step, _ in each.sent]

    def cross(self, fails: str = "") -> None:
        """What is under way has crossed, or has failed, when this returns."""
        taking, exchange = self.snapshots._taking, self.exchange
        assert taking is not None
        assert exchange.begun.wait(LIMIT_S)
        exchange.begun.clear()
        exchange.fails = fails
        exchange.crosses.set()
        assert taking.done.wait(LIMIT_S)

    def begin(self) -> None:
        """A boundary, and all of the step behind it but its end."""
        self.snapshots.begin(self.world, self.step)
        self.snapshots.taken()
        for view in self.world.views:
            view.add_(1.0)

    def flags(self, step_s: float = 1.0) -> Flags:
        return self.snapshots.flags(self.step + 1, step_s)

    def agree(self, *flags: Flags, members: int = 2) -> None:
        """The step's end, with what all have told."""
        self.step += 1
        raised = Flags._make(map(sum, zip(*flags, strict=True)))
        self.snapshots.agreed(StepResult(0.0, 0.0, 0.0, raised), members)

    def train(self, other: Flags | None = None, crosses: bool = True) -> Flags:
        """A whole step; the other worker of a pair tells the same, unless told."""
        pending = len(self.steps_sent)
        self.begin()
        taking = self.snapshots._taking
        if crosses and taking is not None and taking.pending and not taking.done.is_set():
            self.cross()
        assert len(self.steps_sent) <= pending + 1
        flags = self.flags()
        self.agree(flags, flags if other is None else other)
        return flags

    @property
    def held(self) -> list[int]:
        """The steps of what is complete, its own share's and its wards'."""
        return [each.scalars.step for each in self.snapshots.held()]


@contextlib.contextmanager
def played_exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts them in the place of real ones."""
    monkeypatch.setattr(keeping, "Exchange", PlayedExchange)
    PlayedExchange.made, PlayedExchange.shares = [], {}
    yield
    for each in PlayedExchange.made:
        each.close()


class OthersShares(dict[tuple[int, int, int], Any]):
    """The other worker of a pair has always sent."""

    def __init__(self, one: Keeper) -> None:
        super().__init__()
        self._one = one

    def __missing__(self, key: tuple[int, int, int]) -> Snapshot:
        generation, step, rank = key
        share = Snapshot(TIED, self._one.world.rank_map.layout, rank, generation)
        for chunk in share.chunks:
            chunk.zero_()
        share.scalars, share.digests = self._one.world.scalar_state(step), share.digest()
        return share


def of_a_pair(every_steps: Any, **options: Any) -> Keeper:
    """One of two workers, of whom the other one is not there."""
    return in_pair(Keeper(4, every_steps, **options))


def in_pair(one: AnyKeeper) -> AnyKeeper:
    PlayedExchange.shares = OthersShares(one)
    one.enter(PAIR, generation=0)
    return one
