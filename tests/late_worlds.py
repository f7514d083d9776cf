"""A whole run on late devices: the real trainer, handoff, transport and groups, in threads; what
stands in is the world that is trained, and the wires to the coordinator.

In that world every element of the state grows by one a step, so all that a device sees or leaves
behind is known; what it sees otherwise is noted in the ledger.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import DeadlineSection, HandoffSection, TrainSection
from liver_hpc.handoff.session import Session, Target
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Action, Ended, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import Event, Requested, StateSaved, WorkerLost, WorldRef
from liver_hpc.protocol.machine import HandoffMachine
from liver_hpc.worker.holder import LeftWorld
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Room
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.state import WorldState
from liver_hpc.world.steps import Flags, Gradients, StepResult
from tests.late_device import LateDevice, LateGroup, LateNetwork, Machines, Work
from tests.unit.layout.models import TIED
from tests.unit.world.test_state import numbers, state_at

SEED = 5
ANSWER_S = 20.0
"""The longest that a test waits for the run."""
STAGING_BYTES = 4096
LIMITS = DeadlineSection(
    prepare_s=5.0, boundary_s=8.0, transfer_s=6.0, collective_s=6.0, control_s=5.0, release_s=5.0
)


class LateWorld:
    """What `liver_hpc.world.world.World` is to the handoff.

    ledger: what went wrong. syncs: whether the host reads the loss, as on the last stage. breaks:
    the forward fails on the host.
    """

    ledger: list[str]
    syncs = False
    breaks: frozenset[int] = frozenset()

    def __init__(
        self,
        recipe: Any,
        rank_map: RankMap,
        worker: int,
        generation: int,
        device: LateDevice,
        *,
        allocating: Any = None,
    ) -> None:
        at = rank_map.coordinate_of(worker)
        assert at is not None
        self.recipe, self.rank_map, self.at = recipe, rank_map, at
        self.generation, self.worker, self.device = generation, worker, device
        self.book = GroupBook(generation, worker, device)
        self._group = self.book.group(rank_map.workers)
        self.state = state_at(TIED, rank_map.layout, at)
        first = state_at(TIED, rank_map.layout, at)
        first.initialize(numbers, SEED)
        self._views = {
            kind: [self.state.view(kind, *owned) for owned in self.state.boxes(kind)]
            for kind in TIED.kinds
        }
        self._was = {
            kind: torch.cat([first.view(kind, *owned).reshape(-1) for owned in first.boxes(kind)])
            for kind in TIED.kinds
        }
        self._closed = self._gathers = False
        self.taken: frozenset[int] = frozenset()
        self.backward = Work("no backward yet", ())

    def _launch(self, what: str, end: Callable[[], None]) -> Work:
        what = f"{what} of generation {self.generation}"

        def checked() -> None:
            if self._closed:
                self.ledger.append(f"{what} in freed memory")
            else:
                end()

        return self.device.launch(what, checked)

    def differs(self, step: int, kinds: tuple[str, ...]) -> str:
        """Which kind of state is not what it is after `step` steps; empty for none."""
        for kind in kinds:
            flat = torch.cat([view.reshape(-1) for view in self._views[kind]])
            if not torch.allclose(flat, self._was[kind] + step, atol=1e-3):
                return f"{kind} of worker {self.worker}, generation {self.generation}"
        return ""

    def _see(self, when: str, step: int, kinds: tuple[str, ...]) -> None:
        if found := self.differs(step, kinds):
            self.ledger.append(f"{when} of step {step} saw other {found}")

    def _grow(self, kinds: tuple[str, ...]) -> None:
        for kind in kinds:
            torch._foreach_add_(self._views[kind], 1.0)

    def _fill(self, value: float) -> None:
        for kind in TIED.kinds:
            for view in self._views[kind]:
                view.fill_(value)

    # ---- what the handoff calls

    allows_rehearsal_beside = True
    in_training_lane = False

    def accumulate_in_training_lane(self) -> None:
        self.in_training_lane = True

    def warm_up(self, again: bool = True) -> None:
        self._launch("rehearsal", lambda: self._fill(777.0))

    def forward_backward(self, step: int, *, gathered: bool = False) -> Gradients:
        self.settle()
        self._launch("forward", lambda: self._see("forward", step, (PARAMETER,)))
        if self.worker in self.breaks and self.generation == 2:
            raise RuntimeError("the forward fails")
        self._reduce(torch.ones(1))
        self.backward = self._launch("backward", lambda: self._see("backward", step, (PARAMETER,)))
        if self.syncs:
            self.device.own_lane().wait()
        return Gradients(0.0, 1.0)

    def update(self, step: int) -> tuple[float, float]:
        self._launch("update", lambda: self._see("update", step, TIED.optimizer_kinds))
        self._launch("update", lambda: self._grow(TIED.optimizer_kinds))
        self._gathers = True  # parameters, with the next forward or at the boundary
        return 0.0, 0.0

    def settle(self) -> None:
        if self._gathers:
            self._launch("gather", lambda: self._grow((PARAMETER,)))
        self._gathers = False

    def agree(self, gradients: Any, update: Any, flags: Flags) -> StepResult:
        self.book.check()
        raised = torch.tensor([float(flag) for flag in flags])
        self._reduce(raised)
        self.device.own_lane().wait()
        self.book.check()
        return StepResult(0.0, 0.0, 0.0, Flags._make(raised.tolist()))

    def _reduce(self, values: torch.Tensor) -> None:
        if self._group.backend is not None:
            self._group.backend.allreduce([values]).wait()

    def scalar_state(self, step: int) -> m.ScalarState:
        return m.ScalarState(
            step=step, consumed_samples=step, optimizer_step=step, loss_scale=1.0, seed=SEED
        )

    def load_scalar_state(self, scalars: m.ScalarState) -> None:
        """It is in no tensor here."""

    def close(self, spared: frozenset[int] = frozenset()) -> None:
        self.state.release()
        self._closed = True
        self.book.close()

    def abandon(self, *, written_to: bool = False) -> WorldState:
        self.book.close()
        return self.state


class _Store(dist.HashStore):  # type: ignore[misc]
    """The coordinator's, for all."""

    def close(self) -> None:
        """One object for all: nobody else's requests may end."""

    def delete_keys(self, keys: list[str]) -> int:
        return sum(map(self.delete_key, keys))


@dataclass
class _Seat:
    """One worker: its trainer, and the thread that it trains in."""

    trainer: Trainer
    device: LateDevice
    network: LateNetwork
    thread: threading.Thread | None = None
    error: BaseException | None = None


@dataclass
class LateRun:
    """A run from its first world on. arm: called before all are told that all are prepared.
    saves_every: `checkpoint.every_steps`; anything that a step can be taken modulo. checkpoints:
    where they are written, but for those that training waits for."""

    machines: Machines
    source: RankMap
    handoff: HandoffSection = field(
        default_factory=lambda: HandoffSection(
            staging_bytes=STAGING_BYTES, bucket_bytes=512, take_over=False, overlap="always"
        )
    )
    rooms: dict[int, Room] = field(default_factory=dict)
    ledger: list[str] = field(default_factory=list)
    arm: Callable[[], None] = lambda: None
    saves_every: Any = None
    checkpoints: Path = Path("checkpoints")

    def __post_init__(self) -> None:
        self.seats: dict[int, _Seat] = {}
        self.ended: queue.Queue[Ended] = queue.Queue()
        self.said: list[m.FromWorker] = []
        self._store = _Store()
        self._store.set_timeout(timedelta(seconds=2))
        self._machine = HandoffMachine(LIMITS, SystemClock())
        self._inbox: queue.Queue[Any] = queue.Queue()
        self._saved = Counter[int]()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    # ---- what a test does

    def begin(self) -> None:
        """Trains the first world."""
        begin = m.Begin(generation=1, rank_map=m.WireRankMap.of(self.source))
        for worker in self.source.workers:
            self._start(worker, lambda trainer: trainer.begin(begin))
        self._thread.start()

    def hand_off(
        self,
        target: RankMap,
        within_s: float = ANSWER_S,
        *,
        bounded: bool = False,
        steps_s: float = 0.0,
    ) -> Ended:
        """One handoff; what came of it. AssertionError where nothing does."""
        self.request(target, bounded=bounded, steps_s=steps_s)
        return self.end(within_s)

    def request(self, target: RankMap, *, bounded: bool = False, steps_s: float = 0.0) -> None:
        """Begins a handoff. steps_s: what steps may take that lie within it."""
        source = WorldRef(1, self.source)
        self._inbox.put(Requested(2, source, target, "a test", bounded, steps_s=steps_s))

    def end(self, within_s: float = ANSWER_S) -> Ended:
        """What came of it. AssertionError where nothing does."""
        try:
            return self.ended.get(timeout=within_s)
        except queue.Empty:
            errors = {worker: seat.error for worker, seat in self.seats.items()}
            raise AssertionError(
                f"no end: {errors}, {self.ledger}, {self.machines.unfinished()}"
            ) from None

    def stop(self, workers: tuple[int, ...]) -> dict[int, LateWorld]:
        """Ends training after one more step; the worlds of these workers."""
        for worker in workers:
            self.seats[worker].trainer.ask_to_stop(m.Stop())
        worlds = {}
        for worker in workers:
            seat = self.seats[worker]
            assert seat.thread is not None
            seat.thread.join(ANSWER_S)
            assert not seat.thread.is_alive(), f"{worker} trains; {self.machines.unfinished()}"
            worlds[worker] = seat.trainer._world
        return worlds  # type: ignore[return-value]

    def target(self, worker: int) -> Target:
        """What PREPARE made on a worker."""
        session = self.seats[worker].trainer.session
        assert session is not None
        assert session.prepared is not None
        return session.prepared

    def check(self, workers: tuple[int, ...]) -> None:
        """Ends training, and looks at all that devices saw and left behind."""
        for worker, world in self.stop(workers).items():
            world.settle()
            world.device.training.wait()
            if found := world.differs(self.seats[worker].trainer.step, TIED.kinds):
                self.ledger.append(f"at the end: other {found}")
            if beside := world.device._beside:
                self.ledger.append(f"{beside} of worker {worker} count as beside its steps")
        assert not self.ledger, self.ledger[:4]

    # ---- workers

    def _start(self, worker: int, enter: Callable[[Trainer], None]) -> _Seat:
        seat = self.seats.get(worker) or self._seat(worker)

        def train() -> None:
            try:
                seat.device.enter()
                with seat.device.training.entered():
                    enter(seat.trainer)
                    seat.trainer.train()
            except LeftWorld:
                return
            except BaseException as error:  # noqa: BLE001 - shown by the test
                seat.error = error

        seat.thread = threading.Thread(target=train, daemon=True)
        seat.thread.start()
        return seat

    def _seat(self, worker: int) -> _Seat:
        device = LateDevice(self.machines, worker, self.rooms.get(worker))
        network = LateNetwork(device)
        config: Any = SimpleNamespace(
            cluster=SimpleNamespace(kind="local"),
            handoff=self.handoff,
            limits=LIMITS,
            deadlines=LIMITS,
            train=TrainSection(steps=1 << 30, seed=SEED, global_batch=1),
            eval=None,
            checkpoint=SimpleNamespace(every_steps=self.saves_every, cost=1.0),
            snapshots=SimpleNamespace(every_steps=None),
        )
        recipe: Any = SimpleNamespace(spec=TIED, initial=numbers, tokens=lambda: 1)
        store: Any = self._store
        context = WorkerContext(
            worker=worker,
            config=config,
            recipe=recipe,
            device=device,
            network=network,
            clock=SystemClock(),
            send=self._hear,
            open_store=lambda: store,
            checkpoints=self.checkpoints,
        )
        self.seats[worker] = _Seat(Trainer(context), device, network)
        return self.seats[worker]

    def _hear(self, message: m.FromWorker) -> None:
        self.said.append(message)
        if isinstance(message, m.Prepared):
            rehearsing = f"worker {message.worker}: rehearsal of generation 2"
            if rehearsing in self.machines.unfinished():
                self.ledger.append(f"worker {message.worker} is prepared before its device is")
        elif isinstance(message, m.Vote) and message.ok:
            world = self.target(message.worker).world
            if world is not None and not cast(LateWorld, world).backward.done:
                self.ledger.append(f"worker {message.worker} votes before its device is done")
        self._inbox.put(message)

    # ---- the coordinator

    def _serve(self) -> None:
        heard = (m.Prepared, m.AtBoundary, m.Vote, m.FirstStep, m.Released, m.Failed, m.Aborted)
        while not self.machines.over.is_set():
            try:
                event = self._inbox.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(event, m.Saved):
                step = event.scalars.step
                self._saved[step] += 1
                waits = self._machine.phase in (Phase.ARMED, Phase.TRANSFER)
                if waits and self._saved[step] == len(self.source.workers):
                    self._handle(StateSaved(step))
            if isinstance(event, (*heard, Requested, WorkerLost)) and (
                isinstance(event, Requested) or self._machine.attempt is not None
            ):
                self._handle(event)

    def _handle(self, event: Event) -> None:
        try:
            actions: list[Action] = self._machine.handle(event)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.ledger.append(f"{type(error).__name__}: {error}")
            return
        for action in actions:
            if isinstance(action, Ended):
                self.ended.put(action)
            elif isinstance(action, LaunchJoiners):
                assert isinstance(event, Requested)
                for worker in event.joiners:
                    self._seat(worker)
                    self._handle(m.Hello(worker=worker, pid=1, host="here", booted_s=0.0))
            elif isinstance(action, Send):
                self._send(action)

    def _send(self, action: Send) -> None:
        message = action.message
        if isinstance(message, m.Arm):
            self.arm()
        for worker in action.workers:
            trainer = self.seats[worker].trainer
            if isinstance(message, m.Prepare):
                if not (session := trainer.open_session(message)).is_source:
                    self._start(worker, partial(_join, session))
            elif isinstance(message, m.Exit):
                self._inbox.put(WorkerLost(worker, "exit"))
            elif trainer.session is not None:
                trainer.session.deliver(message)  # type: ignore[arg-type]


def _join(session: Session, trainer: Trainer) -> None:
    if not trainer.join(session):
        raise LeftWorld("it is kept, and no other attempt comes", session.generation)


def _free(state: WorldState, kinds: Iterable[str] = TIED.kinds) -> None:
    """Memory that is freed is somebody else's, who writes to it at once."""
    with _disable_current_modes():
        for kind in kinds:
            for owned in state.boxes(kind):
                state.view(kind, *owned).fill_(-1.0)


def _free_kinds(world: Any, kinds: Iterable[str], spared: object = ()) -> None:
    _free(world.state, [kind for kind in kinds if kind != GRADIENT])


def _saved(save: Any, world: Any) -> m.Saved:
    """A checkpoint of which nobody will read."""
    return m.Saved(worker=world.worker, generation=world.generation, scalars=save.scalars)


@contextlib.contextmanager
def late_worlds(monkeypatch: pytest.MonkeyPatch, machines: Machines) -> Iterator[list[str]]:
    """Puts the stand-ins in their places; the ledger of what goes wrong."""
    LateWorld.ledger = []
    monkeypatch.setattr(LateWorld, "syncs", False)
    monkeypatch.setattr(LateWorld, "breaks", frozenset())
    for module in ("liver_hpc.handoff.prepare", "liver_hpc.worker.holder"):
        monkeypatch.setattr(f"{module}.World", LateWorld)
    # As on a GPU: what else this process has rehearsed says nothing about a seat.
    monkeypatch.setattr("liver_hpc.world.rehearsed.all_known", lambda _device: False)
    monkeypatch.setattr(WorldState, "release", _free)
    monkeypatch.setattr("liver_hpc.checkpoint.saving.Save.now", _saved)
    monkeypatch.setattr("liver_hpc.world.hollow.hollow", lambda _world: None)
    monkeypatch.setattr("liver_hpc.world.hollow.free", _free_kinds)
    monkeypatch.setattr("liver_hpc.world.hollow.allocate", lambda _world, _kinds: None)
    monkeypatch.setattr("liver_hpc.world.groups.Group", LateGroup)
    monkeypatch.setattr("liver_hpc.world.groups._leave", lambda *_group: None)
    yield LateWorld.ledger
    machines.stop()
